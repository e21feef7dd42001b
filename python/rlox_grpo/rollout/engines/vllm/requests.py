"""Make requests to vLLM and read completions, for the in-process and the HTTP engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from rlox_grpo.batch.sampling_mask import find_outside
from rlox_grpo.errors import EngineError
from rlox_grpo.rollout.engines.calls import Limits
from rlox_grpo.types import Completion, Int16Array, Int32Array, Int64Array, Prompt, Sampling, SamplingMask

if TYPE_CHECKING:
    from rlox_grpo.prompts.pictures import PictureReader

LOWEST_TEMPERATURE = 0.01
"""vLLM silently replaces a lower temperature above 0 by this temperature."""

MODEL_NAME = "policy"
"""The served model's name in requests."""

EXTRA = ("presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "allowed_token_ids")
"""Supported extra parameters: vLLM applies them before it computes the reported log-probs."""


def find_limits(engine: str, model: Any, max_length: int | None, *, has_tokenizer: bool) -> Limits:
    """Return the limits of vLLM for the policy's model. If ``max_length`` is None, the model's maximum is used.

    Raises:
        ValueError: the model is not a transformers model.
    """
    if not hasattr(model, "config") or not hasattr(model.config, "get_text_config"):
        raise ValueError(f"engine={engine!r} needs a transformers model, got {type(model).__name__}")
    config = model.config.get_text_config(decoder=True)
    longest = max_length or getattr(config, "max_position_embeddings", None)
    return Limits(int(config.vocab_size), longest, has_tokenizer, EXTRA, LOWEST_TEMPERATURE)


def list_ids_without_text(vocab_limit: int | None, vocab_size: int | None, reader: PictureReader | None) -> list[int]:
    """Return the ids that are never sampled, ascending: those without a token, and with a ``reader`` those of pictures.

    Args:
        vocab_limit: ids from here on have no token; None: all have one.
        vocab_size: number of rows of the output layer.
        reader: reads the pictures of prompts; its excluded ids stand for pictures and videos.
    """
    vocab_size = vocab_size or 0
    marks = () if reader is None else reader.excluded_ids
    return sorted({*range(vocab_limit or vocab_size, vocab_size), *marks})


def derive_prompt_seeds(prompts: Sequence[Prompt], seed: int) -> list[int]:
    """Derive a 62-bit seed for each prompt from ``seed`` and the prompt's index, independent of order and neighbours.

    A prompt that occurs twice in one call gets two seeds. Two bits are free because vLLM adds a completion's index in
    its group to the seed.
    """
    seen: Counter[int] = Counter()
    seeds = []
    for prompt in prompts:
        entropy = [seed, prompt.index, seen[prompt.index]]
        seeds.append(int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> np.uint64(2)))
        seen[prompt.index] += 1
    return seeds


def make_request_fields(sampling: Sampling, group_size: int, seed: int, end_ids: Sequence[int]) -> dict[str, Any]:
    """Return the sampling parameters that vLLM's Python and HTTP interfaces share.

    The parameters include the end tokens of the policy, because vLLM would read them from files that the trainer may
    not have.
    """
    return {
        "n": group_size,
        "seed": seed,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "max_tokens": sampling.max_new_tokens,
        "logprobs": 0,  # the sampled token's alone
        "stop": list(sampling.stop),
        "stop_token_ids": sorted({*end_ids, *sampling.stop_token_ids}),
        "ignore_eos": True,
        **{name: list(value) if isinstance(value, tuple) else value for name, value in sampling.extra},
    }


def admit_mask(fields: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """Return sampling parameters that an engine with ``return_sampling_mask`` accepts, for the same distribution.

    Such an engine of vLLM refuses every request with temperature 0 or without ``top_k``. Greedy decoding becomes
    ``top_k = 1``, and no ``top_k`` becomes the size of the vocabulary.
    """
    if fields["temperature"] == 0:
        return {**fields, "temperature": 1.0, "top_k": 1, "top_p": 1.0, "min_p": 0.0}
    return {**fields, "top_k": fields.get("top_k") or vocab_size}


def make_parameters(fields: dict[str, Any], without_text: Sequence[int]) -> Any:
    """Return ``SamplingParams`` of vLLM's Python interface, with which the ids ``without_text`` are never sampled."""
    from vllm import SamplingParams

    return SamplingParams(
        **fields,
        logit_bias=dict.fromkeys(without_text, -float("inf")) or None,
        flat_logprobs=True,
        detokenize=bool(fields["stop"]),
    )


def read_completion(
    token_ids: Int64Array, log_probs: Any, finish_reason: str, sampling: Sampling, vocab_limit: int | None, source: str
) -> Completion:
    """Convert one completion to the trainer's form, without its text.

    At temperature 0 the log-probs are set to 0, because the sampled token has probability 1; vLLM reports those of
    the softmax.

    Raises:
        EngineError: an unfinished completion, log-probs that do not fit, or a token that has no text.
    """
    values = np.asarray(log_probs, np.float32)
    if finish_reason not in ("stop", "length"):
        raise EngineError(f"{source}: a completion ended by {finish_reason!r}, expected 'stop' or 'length'")
    if values.shape != token_ids.shape or not len(token_ids):
        raise EngineError(f"{source}: {values.shape} log-probs for {token_ids.shape} tokens")
    if not np.isfinite(values).all():
        raise EngineError(f"{source}: a log-prob is {values[~np.isfinite(values)][0]} in {values.tolist()[:8]}")
    if vocab_limit is not None and int(token_ids.max()) >= vocab_limit:
        raise EngineError(f"{source}: sampled token {int(token_ids.max())}, which has no text (limit {vocab_limit})")
    if sampling.temperature == 0:
        values = np.zeros_like(values)
    return Completion(token_ids, values, "stop" if finish_reason == "stop" else "length")


def read_choices(
    choices: Sequence[Any], group_size: int, sampling: Sampling, vocab_limit: int | None, source: str
) -> list[Completion]:
    """Convert the choices of a server's answer to the trainer's form, in their order, without their texts.

    Raises:
        EngineError: as :func:`read_completion`, or not ``group_size`` choices.
    """
    if len(choices) != group_size:
        raise EngineError(f"{source}: {len(choices)} completions instead of {group_size}")
    return [
        read_completion(
            np.asarray(choice["token_ids"], np.int64),
            choice["logprobs"]["token_logprobs"],
            str(choice["finish_reason"]),
            sampling,
            vocab_limit,
            source,
        )
        for choice in sorted(choices, key=lambda choice: int(choice["index"]))
    ]


def read_output(
    output: Any,
    sampling: Sampling,
    vocab_limit: int | None,
    prompt_length: int = 0,
    router_layers: Sequence[int] | None = None,
) -> Completion:
    """Convert one output of vLLM's Python interface, with flat log-probs, to the trainer's form.

    With ``router_layers``, the completion has the experts of these layers. If ``sampling`` asks for it, the completion
    has the ids from which each token was drawn.

    Raises:
        EngineError: as :func:`read_completion`, log-probs of other tokens, or experts or masks that do not fit the
            tokens.
    """
    flat = output.logprobs
    token_ids = np.asarray(output.token_ids, np.int64)
    if list(flat.token_ids) != token_ids.tolist():
        raise EngineError("vLLM reported log-probs of other tokens than it sampled")
    completion = read_completion(token_ids, flat.logprobs, str(output.finish_reason), sampling, vocab_limit, "vLLM")
    if sampling.return_sampling_mask:
        completion = replace(completion, sampling_mask=_read_mask(output.sampling_mask, token_ids))
    if router_layers is None:
        return completion
    experts = _read_experts(output.routed_experts, prompt_length + len(token_ids), router_layers)
    return replace(completion, experts=experts)


def _read_mask(mask: Any, token_ids: Int64Array) -> SamplingMask[Int32Array]:
    """Convert vLLM's mask, a list of ids for each token, to the trainer's form, with ascending ids.

    Raises:
        EngineError: not a list of ids for each token, or a token that is not in its list.
    """
    lists = None if mask is None else mask.token_ids
    if lists is None or len(lists) != len(token_ids):
        count = None if lists is None else len(lists)
        raise EngineError(f"vLLM returned sampling masks of {count} tokens, expected {len(token_ids)}")
    sizes = np.asarray([len(ids) for ids in lists], np.int32)
    ids = np.asarray([index for row in lists for index in row], np.int32)
    order = np.lexsort((ids, np.repeat(np.arange(len(lists)), sizes)))  # ascending for each token
    read = SamplingMask(sizes, ids[order])
    # Of no ids, a mask would say that all of them could be drawn.
    outside = np.union1d(find_outside(read, token_ids), np.flatnonzero(sizes == 0))
    if outside.size:
        position = int(outside[0])
        raise EngineError(
            f"vLLM sampled token {token_ids[position]} at position {position}, which is not in its sampling mask of "
            f"{sizes[position]} ids"
        )
    return read


def _read_experts(routed: Any, tokens: int, layers: Sequence[int]) -> Int16Array:
    """Return the experts of ``layers`` from vLLM's ``routed_experts [tokens - 1, all layers, k]``; the last is −1."""
    shape = getattr(routed, "shape", None)
    if shape is None or len(shape) != 3 or shape[0] != tokens - 1 or shape[1] <= max(layers):
        raise EngineError(
            f"vLLM returned routed_experts of shape {shape} for {tokens} tokens, expected {tokens - 1} tokens and more "
            f"than {max(layers)} layers"
        )
    chosen = np.full((tokens, len(layers), shape[2]), -1, np.int16)
    chosen[:-1] = routed[:, list(layers)]
    return chosen


SCORING: Mapping[str, Any] = MappingProxyType({"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0})
"""Sampling parameters of a request for a prompt's own log-probs: at temperature 1, over every id."""


def read_prompt_log_probs(entries: Any, token_ids: Sequence[int]) -> list[float]:
    """Return the log-probs of all tokens of a prompt but the first, from vLLM's Python or HTTP interface.

    Raises:
        EngineError: entries that are not those of ``token_ids``.
    """
    if not isinstance(entries, Sequence) or len(entries) != len(token_ids):
        raise EngineError(f"vLLM gave no log-probs of a prompt of {len(token_ids)} tokens: {str(entries)[:200]}")
    values = []
    for position, token in list(enumerate(token_ids))[1:]:
        entry = entries[position] if isinstance(entries[position], Mapping) else {}
        candidate = entry.get(token, entry.get(str(token)))
        value = candidate.get("logprob") if isinstance(candidate, Mapping) else getattr(candidate, "logprob", None)
        if not isinstance(value, (int, float)):
            raise EngineError(
                f"vLLM gave no log-prob of token {token} at place {position} of a prompt: {str(entry)[:99]}"
            )
        values.append(float(value))
    return values
