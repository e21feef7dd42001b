"""Forward pass of the policy: log-probs and entropies of the completion tokens of a batch.

There are three forward passes. The trainer uses the first that gives the same results as the model on a few tokens:

- packed: all rows in one, each prompt and each common prefix once, without padding and without logits in memory
  (:mod:`rlox_grpo.model.packed_row`). If packing saves few tokens (:data:`WORTH_PACKING`), a batch is not packed;
- by hidden states: padded rows, without logits in memory;
- by logits: padded rows, for any module with ``forward(input_ids) -> logits``.

Padding is on the right, so no real token of a causal model attends to padding. Neither an attention mask nor position
ids are passed, and attention takes its fast causal path.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from rlox_grpo.batch.build import build_batch, group_prompt, group_tokens
from rlox_grpo.batch.sampling_mask import select_tokens
from rlox_grpo.errors import ConfigError
from rlox_grpo.model.full_kl import token_log_probs_and_kl
from rlox_grpo.model.log_probs import token_log_probs
from rlox_grpo.model.packed_attention import NAME as PACKED_ATTENTION
from rlox_grpo.model.packed_attention import NO_MASK, register_packed_attention
from rlox_grpo.model.packed_row import PackedRow, build_packed_row
from rlox_grpo.model.prefix_tree import PrefixTree, build_prefix_tree, find_first_rows
from rlox_grpo.model.routing import Routers, find_routers, refuse_other_routers
from rlox_grpo.model.tile_columns import EXCLUDED, exclude_ids
from rlox_grpo.model.vision import Vision, make_vision
from rlox_grpo.types import Batch, OutputHead, Prompt, SamplingMask, TokenDistributions

if TYPE_CHECKING:
    from rlox_grpo.prompts.pictures import PictureReader

logger = logging.getLogger(__name__)

WORTH_PACKING = 7 / 8
"""A batch is packed when its packed row has at most this share of the padded rows' tokens. Attention over a packed row
costs a gather and a merge that padded rows do not: on a CPU packing is as fast at 0.85, 7 % faster at 0.75, and 4 %
slower at 0.9 (`benches/update.py`)."""


def refuse_distributions(batch: Batch) -> TokenDistributions:
    """Raise ValueError: there are log-probs only of the sampled tokens."""
    raise ValueError("kl_estimator='full' needs whole distributions, and this reference gives token log-probs only")


@dataclass(frozen=True, eq=False)
class Forward:
    """Batch → log-probs ``[N, T]`` with gradient and entropies ``[N, T]``; zeros outside ``loss_mask``.

    With a sampling mask, distributions are over the ids from which each token was drawn.
    If gradients are on, the tokens of ``batch.environment`` have log-probs and entropies too.
    If the batch has the reference's distributions, a third tensor follows: KL(policy ‖ reference) ``[N, T]``, with
    gradient.
    If gradients are off, as for a reference, entropies are zeros, unless ``entropy_always`` is set.

    Attributes:
        shares_prompts: Whether common prefixes of neighbouring rows are forwarded once, if this saves enough tokens.
        is_split: Whether the model runs as a decoder and an output layer.
        distributions: Hidden states and output layer, or logits, of the tokens under ``loss_mask``.
        routers: The routers of a mixture of experts, which record each forward pass; None: there are none, or they are
            not watched.
    """

    compute: Callable[..., tuple[Tensor, ...]]
    shares_prompts: bool
    distributions: Callable[[Batch], TokenDistributions] = refuse_distributions
    is_split: bool = False
    routers: Routers | None = None

    def __call__(self, batch: Batch, *, is_unscaled: bool = False) -> tuple[Tensor, ...]:
        """Run the model over ``batch``. With ``is_unscaled``, use temperature 1, no mask, and all ids of the layer."""
        return self.compute(batch, is_unscaled=is_unscaled)


class ForwardModule(nn.Module):
    """A model and its forward pass as one module, around whose forward DeepSpeed or FSDP2 gathers the parameters."""

    def __init__(self, model: nn.Module, forward: Forward | None = None) -> None:
        super().__init__()
        self.model = model
        self.take(forward)

    def take(self, forward: Forward | None) -> None:
        """Set the forward pass."""
        self._forward = (forward,)  # in a tuple, so that torch does not register it as a submodule

    def forward(self, batch: Batch | None, call: Callable[[], Any] | None = None, *, is_unscaled: bool = False) -> Any:
        """See :class:`Forward`. With ``call``, which may run the model, return ``call()`` instead."""
        if call is not None:
            return call()
        (forward,) = self._forward
        assert forward is not None
        assert batch is not None
        return forward(batch, is_unscaled=is_unscaled)


@dataclass(frozen=True, eq=False)
class SplitModel:
    """A transformers model as decoder and output layer, so that logits are computed in tiles."""

    decoder: nn.Module
    head: nn.Linear
    scale: float
    softcap: float | None
    excluded_ids: tuple[int, ...] = ()
    in_float32: bool = False

    def output_head(self, vocabulary: int | None, *, has_all_ids: bool = False) -> OutputHead:
        """The head over the first ``vocabulary`` ids, made at each call, because an updater may replace parameters.

        ``excluded_ids`` have the probability 0, except with ``has_all_ids``.
        """
        weight: Tensor = self.head.weight
        bias: Tensor | None = self.head.bias
        if vocabulary is not None and vocabulary < weight.shape[0]:
            # A view of the first rows, so that the whole weight gets a gradient, with zeros for the padding.
            weight, bias = weight[:vocabulary], None if bias is None else bias[:vocabulary]
        if self.excluded_ids and not has_all_ids:
            # The engine never samples these ids, so they are no part of the distribution.
            bias = weight.new_zeros(len(weight), dtype=torch.float32) if bias is None else bias.float()
            inside = [index for index in self.excluded_ids if index < len(weight)]
            bias = bias.index_fill(0, torch.tensor(inside, device=bias.device), EXCLUDED)
        return OutputHead(weight, bias, self.scale, self.softcap, self.in_float32)


@dataclass(frozen=True, eq=False)
class _ForwardPass:
    """The forward pass that :func:`make_forward` has chosen for a model.

    Attributes:
        model: runs by logits if there is no ``split``.
        split: the model as decoder and output layer; None: it is not one that can be split.
        packs: whether rows are packed where this saves enough tokens.
        vision: what pictures need; None: the model is trained on text.
        routers: the routers of a mixture of experts, if they are watched.
        temperature, vocabulary, autocast_dtype, entropy_gradient, entropy_always: see :func:`make_forward`.
    """

    model: nn.Module
    split: SplitModel | None
    packs: bool
    vision: Vision | None
    routers: Routers | None
    temperature: float
    vocabulary: int | None
    autocast_dtype: torch.dtype | None
    entropy_gradient: bool
    entropy_always: bool

    def compute(self, batch: Batch, *, is_unscaled: bool = False) -> tuple[Tensor, ...]:
        """Run the model over ``batch``; see :class:`Forward`."""
        has_gradient = torch.is_grad_enabled()
        # A pass with gradients predicts the tokens of the environment and of demonstrations too.
        mask = batch.predicted_mask if has_gradient else batch.loss_mask
        if is_unscaled:
            batch = replace(batch, log_probs=replace(batch.log_probs, mask=None))
        policy, row = self._read(replace(batch, loss_mask=mask), has_all_ids=is_unscaled)
        if self.routers is not None:
            self.routers.last.predicting = _locate_predicting(batch, mask, row)
            self.routers.last.sources = None if row is None else row.sources
        options: dict[str, Any] = {
            "temperature": 1.0 if is_unscaled else self.temperature,
            "with_entropy": self.entropy_always or has_gradient,
            "entropy_gradient": self.entropy_gradient and has_gradient,
        }
        if batch.log_probs.ref_distributions is not None:
            return self._compare(policy, row, batch, mask, options)
        log_probs, entropy = take_log_probs(
            policy,
            batch.completion_ids[mask] if row is None else row.predicted_ids,
            sampling_mask=select_mask(batch, mask) if row is None else row.sampling_mask,
            **options,
        )
        if row is not None:
            # [K] → [M]. Backward adds up the gradients of all rows that share a token.
            log_probs, entropy = (_select_rows(values, row.prediction_indices) for values in (log_probs, entropy))
        return scatter_to_rectangle(log_probs, mask), scatter_to_rectangle(entropy, mask)

    def distributions(self, batch: Batch) -> TokenDistributions:
        """Return the distributions of the tokens under ``loss_mask``, ``[M, …]`` in row order."""
        policy, row = self._read(batch)
        return policy if row is None else replace(policy, hidden=_select_rows(policy.hidden, row.prediction_indices))

    def _compare(
        self, policy: TokenDistributions, row: PackedRow | None, batch: Batch, mask: Tensor, options: dict[str, Any]
    ) -> tuple[Tensor, ...]:
        """Return log-probs and entropies of the tokens under ``mask``, and the KL of those under ``loss_mask``."""
        reference = batch.log_probs.ref_distributions
        assert reference is not None
        # [K, H] → [M, H]: rows that share a token of the policy can have different tokens of the reference.
        hidden = policy.hidden if row is None else _select_rows(policy.hidden, row.prediction_indices)
        ref_hidden, has_kl = reference.hidden, batch.loss_mask[mask]
        if batch.environment is not None or batch.demonstration_mask is not None:
            # Tokens of the environment and of demonstrations have no KL: that to zeros is left out below.
            ref_hidden = ref_hidden.new_zeros(len(hidden), ref_hidden.shape[1])
            ref_hidden[has_kl] = reference.hidden
        log_probs, entropy, kl = token_log_probs_and_kl(
            replace(policy, hidden=hidden),
            replace(reference, hidden=ref_hidden),
            batch.completion_ids[mask],
            sampling_mask=select_mask(batch, mask),
            **options,
        )
        outputs = scatter_to_rectangle(log_probs, mask), scatter_to_rectangle(entropy, mask)
        # Unlike that of an index, the backward pass of masked_select adds nothing, so its order is fixed.
        return (*outputs, scatter_to_rectangle(kl.masked_select(has_kl), batch.loss_mask))

    def _read(self, batch: Batch, *, has_all_ids: bool = False) -> tuple[TokenDistributions, PackedRow | None]:
        """Return the distributions of a packed row's K distinct tokens, or of rows' M tokens under ``loss_mask``.

        The distributions are over the ids that can be sampled; with ``has_all_ids`` over all ids of the output layer.
        """
        split, vision = self.split, self.vision
        rows = None if has_all_ids else self.vocabulary
        is_shared = self.packs and not (vision is not None and vision.shows_later(batch))
        tree = build_prefix_tree(batch) if is_shared else None
        row = build_packed_row(tree, batch) if tree is not None and is_worth_packing(tree, batch) else None
        if vision is None and any(batch.pictures):
            raise ValueError("a prompt has pictures, and this forward pass has no processor: the model is text only")
        watch = nullcontext() if self.routers is None else self.routers.watch(_lay_out_choices(batch, row))
        with set_autocast(batch.input_ids.device, self.autocast_dtype), watch:
            if split is None:
                output = self.model(batch.input_ids)
            elif row is None:
                options = {} if vision is None else vision.prepare_batch(batch)
                states = split.decoder(input_ids=batch.input_ids, use_cache=False, **options).last_hidden_state
                # [N, L, H] → [M, H]: the states that predict a token. The output layer runs on these alone, not on
                # prompts and padding.
                hidden = states[_find_predicting_positions(batch)]
            else:
                assert tree is not None
                # [K, H], each distinct token once.
                options = {} if vision is None else vision.prepare_packed(row, batch, find_first_rows(tree))
                hidden = _compute_packed_hidden(split.decoder, row, options)
        if split is None:
            logits = output if isinstance(output, Tensor) else output.logits  # [N, L, V]
            # [M, ids] logits of the tokens under the mask, float32 or float64.
            logits = _select_predicting_logits(logits, batch)[:, :rows]
            return TokenDistributions(logits if logits.dtype == torch.float64 else logits.float(), None), None
        # The last norm may give float32 under autocast; the output layer's products run in the autocast dtype. On a
        # CPU, float32 products have float32 operands.
        if split.in_float32 and hidden.device.type == "cpu":
            hidden = hidden.float()
        elif self.autocast_dtype is not None:
            hidden = hidden.to(self.autocast_dtype)
        return TokenDistributions(hidden, split.output_head(rows, has_all_ids=has_all_ids)), row


def make_forward(
    model: nn.Module,
    *,
    temperature: float = 1.0,
    vocabulary: int | None = None,
    autocast_dtype: torch.dtype | None = None,
    share_prompts: bool = True,
    torch_compile: bool = False,
    entropy_gradient: bool = False,
    entropy_always: bool = False,
    run: Callable[[Callable[[], Any]], Any] | None = None,
    is_rounded: bool = False,
    like: Forward | None = None,
    reader: PictureReader | None = None,
    watch_routers: bool = False,
    replay: bool = False,
    fp32_lm_head: bool = False,
) -> Forward:
    """Choose the forward pass that fits ``model``.

    Args:
        model: a transformers causal LM (bare or with adapters), or any module with ``forward(input_ids) -> logits``.
        temperature: logits are divided by it, as in sampling.
        vocabulary: number of ids with a token. Later rows of the embedding are padding and are left out; None: all ids.
        autocast_dtype: dtype of the computation in decoder and head; None: the dtype of the weights.
        share_prompts: pack rows if the model allows it.
        torch_compile: compile the decoder with :func:`torch.compile`, for dynamic shapes. Ignored for a module that is
            not a transformers model.
        entropy_gradient: whether entropies have a gradient.
        entropy_always: compute entropies even if gradients are off.
        run: calls a function that runs the model, and returns its result; for sharded models, whose parameters it
            gathers.
        is_rounded: whether ``run`` rounds the parameters to ``autocast_dtype``.
        like: the forward pass of a model with the same architecture. The same choice is made without running the model.
        reader: reads the pictures of prompts; its excluded ids have the probability 0.
        watch_routers: record what the routers of a mixture of experts do.
        replay: also check that their choices can be replayed.
        fp32_lm_head: keep the products of a linear output layer in float32, if its operands have 16 bits.

    Raises:
        ConfigError: there is a ``reader``, and the model takes no pictures, or its output layer is not linear; or with
            ``replay``, the model has no routers whose choices can be replayed.
    """
    vision = make_vision(model, reader)
    routers = find_routers(model) if watch_routers else None

    def choose() -> tuple[SplitModel | None, bool]:
        if like is not None:
            tried = split_model(model, is_tried=True) if like.is_split else None
            if tried is not None and like.shares_prompts:
                _set_packed_attention(tried.decoder if vision is None else vision.text)
            return tried, like.shares_prompts
        split = split_model(model)
        if replay:
            _check_replay(split, routers)
        if split is None or not share_prompts:
            return split, False
        return split, can_pack(split, autocast_dtype, is_rounded=is_rounded, vision=vision)

    # The trials run the model, so every rank of a sharded model takes part in them.
    split, packs = choose() if run is None else run(choose)
    if vision is not None:
        if split is None or split.softcap is not None:
            raise ConfigError(
                f"processor: the output layer of {type(model).__name__} is not a plain linear layer, which pictures in "
                "prompts need: pass a tokenizer without a processor"
            )
        split = replace(split, excluded_ids=vision.reader.excluded_ids)
        vision.reader.tower_use.take()  # without the pictures of the trials
    if split is not None:
        split = replace(split, in_float32=fp32_lm_head)
    if split is not None and torch_compile:
        # The decoder is compiled after the trials, which set its attention.
        compiled: Any = torch.compile(split.decoder, dynamic=True)
        split = replace(split, decoder=compiled)

    forward_pass = _ForwardPass(
        model=model,
        split=split,
        packs=packs,
        vision=vision,
        routers=routers,
        temperature=temperature,
        vocabulary=vocabulary,
        autocast_dtype=autocast_dtype,
        entropy_gradient=entropy_gradient,
        entropy_always=entropy_always,
    )
    return Forward(forward_pass.compute, packs, forward_pass.distributions, is_split=split is not None, routers=routers)


def _check_replay(split: SplitModel | None, routers: Routers | None) -> None:
    """Raise ConfigError if the choices of the routers cannot be replayed; this runs the model on a few tokens."""
    if split is None or routers is None:
        raise ConfigError(
            "router_replay needs a mixture of experts of transformers whose class lists its routers (router_logits), "
            "and this model has none: set router_replay='none'"
        )
    decoder = split.decoder
    input_ids = torch.arange(8, device=split.head.weight.device)[None] % split.head.weight.shape[0]
    refuse_other_routers(routers, lambda: decoder(input_ids=input_ids, use_cache=False).last_hidden_state[0])


def _lay_out_choices(batch: Batch, row: PackedRow | None) -> Tensor | None:
    """Return the forced choices of the S tokens that run, ``int64 [S, layers, k]``; None if nothing is forced."""
    if batch.policy.routing.choices is None:
        return None
    choices = batch.policy.routing.choices.flatten(0, 1).long()
    return choices if row is None else choices[row.sources]


def _locate_predicting(batch: Batch, mask: Tensor, row: PackedRow | None) -> Tensor:
    """Return the index among the S tokens that ran of the one that predicts each token under ``loss_mask``, ``[M]``.

    ``mask`` are the tokens whose log-probs were computed, ``loss_mask`` among them.
    """
    if row is None:
        rows, columns = _find_predicting_positions(batch)
        return rows * batch.input_ids.shape[1] + columns
    return row.predicting[row.prediction_indices][batch.loss_mask[mask]]


def select_mask(batch: Batch, chosen: Tensor) -> SamplingMask[Tensor] | None:
    """Return the sampling mask of the M tokens under ``chosen``, ``bool [N, T]``; None if the batch has none."""
    return None if batch.sampling_mask is None else select_tokens(batch.sampling_mask, chosen)


def take_log_probs(
    policy: TokenDistributions,
    token_ids: Tensor,
    *,
    temperature: float,
    with_entropy: bool,
    entropy_gradient: bool,
    sampling_mask: SamplingMask[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the log-probs ``[M]`` of ``token_ids``, and entropies; see :func:`token_log_probs`."""
    if policy.head is not None:
        return token_log_probs(
            policy.hidden,
            token_ids,
            policy.head,
            temperature=temperature,
            with_entropy=with_entropy,
            entropy_gradient=entropy_gradient,
            sampling_mask=sampling_mask,
        )
    logits = exclude_ids(policy.hidden, sampling_mask)
    # [M, V], the logits of a module without a known output layer, which computes them in any case.
    log_softmax = torch.log_softmax(logits / temperature if temperature != 1.0 else logits, dim=-1)
    log_probs = log_softmax.gather(-1, token_ids[:, None]).squeeze(-1)
    if not with_entropy:
        return log_probs, torch.zeros_like(log_probs)
    with torch.set_grad_enabled(entropy_gradient):
        return log_probs, -torch.linalg.vecdot(log_softmax.exp(), log_softmax)


def _set_packed_attention(decoder: Any) -> None:
    register_packed_attention()
    decoder.set_attn_implementation(PACKED_ATTENTION)


def _compute_packed_hidden(
    decoder: nn.Module, row: PackedRow, options: Mapping[str, Any] = MappingProxyType({})
) -> Tensor:
    """Hidden states ``[K, H]`` that predict the row's distinct tokens; ``options`` are the arguments for pictures."""
    # One row of S tokens; the layout reaches attention through the decoder's keyword arguments.
    inputs: dict[str, Any] = {
        "position_ids": row.position_ids[None],
        "attention_mask": NO_MASK.to(row.input_ids.device),
        "use_cache": False,
        "packed_layout": row.layout,
        **options,
    }
    hidden: Tensor = decoder(input_ids=row.input_ids[None], **inputs).last_hidden_state[0]  # [S, H]
    return _select_rows(hidden, row.predicting)


def set_autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    """Compute in ``dtype`` on ``device``; None: in the dtype of the tensors."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def is_worth_packing(tree: PrefixTree, batch: Batch) -> bool:
    """Whether packing saves enough tokens over padding; does not depend on the model."""
    return tree.num_tokens <= WORTH_PACKING * batch.input_ids.numel()


def can_pack(
    split: SplitModel,
    autocast_dtype: torch.dtype | None = None,
    *,
    is_rounded: bool = False,
    vision: Vision | None = None,
) -> bool:
    """Whether the decoder gives equal hidden states packed and row by row; if so, set its attention to the packed one.

    On a GPU the trial runs in ``autocast_dtype``, as the training step does, because each kernel supports only some
    dtypes. The trial also runs in this dtype if the parameters are rounded to it. With ``vision`` the trial has a
    picture, because some models attend both ways inside a picture, and the attention is that of the language model
    alone.
    """
    decoder: Any = split.decoder
    text: Any = decoder if vision is None else vision.text
    before = text.config._attn_implementation
    if before == PACKED_ATTENTION:
        return True
    # The user has set another attention, or this is a text decoder within a larger model, whose config is not its own.
    if before != "sdpa" or text.config.get_text_config() is not text.config:
        logger.info(
            "%s: its attention is %s; prompts are forwarded with each completion", type(decoder).__name__, before
        )
        return False
    if vision is not None and vision.attends_both_ways:
        logger.info(
            "%s: its attention goes both ways in pictures; prompts are forwarded with each completion",
            type(decoder).__name__,
        )
        return False
    device = split.head.weight.device
    batch = _make_trial_batch(device, split.head.weight.shape[0])
    batch = batch if vision is None else _make_trial_with_picture(device, vision)
    tried_in = autocast_dtype if device.type != "cpu" or is_rounded else None
    was_training = decoder.training
    decoder.eval()
    try:
        with torch.no_grad(), set_autocast(device, tried_in):
            options = {} if vision is None else vision.prepare_batch(batch)
            expected = decoder(input_ids=batch.input_ids, use_cache=False, **options).last_hidden_state[
                _find_predicting_positions(batch)
            ]
            # From here on the decoder has the packed attention. If the results differ, its old attention is restored.
            _set_packed_attention(text)
            tree = build_prefix_tree(batch)
            row = build_packed_row(tree, batch)
            options = {} if vision is None else vision.prepare_packed(row, batch, find_first_rows(tree))
            packed = _compute_packed_hidden(decoder, row, options)[row.prediction_indices]
            same = are_activations_close(packed, expected if tried_in is None else expected.to(tried_in))
    except (ValueError, TypeError, RuntimeError, IndexError, KeyError) as error:
        logger.info("%s: %s", type(decoder).__name__, error)
        same = False
    finally:
        decoder.train(was_training)
    if not same:
        text.set_attn_implementation(before)
        logger.info("%s cannot be packed; prompts are forwarded with each completion", type(decoder).__name__)
    return same


def _make_trial_batch(device: torch.device, vocabulary: int) -> Batch:
    """Two prompts of 3 and 2 tokens with two completions each, of 1 to 4 tokens; the first two share a prefix."""
    # Rows of 7 ids, 3 8 13 18 … and 38 43 … with a large vocabulary. The two completions of the first prompt begin with
    # the same id, so they share a prefix.
    ids = (np.arange(28).reshape(4, 7) * 5 + 3) % vocabulary
    ids[1, 3] = ids[0, 3]
    first, second = (
        group_tokens(ids[0, :3], [ids[0, 3:5], ids[1, 3:]]),
        group_tokens(ids[2, :2], [ids[2, 2:3], ids[3, 2:5]]),
    )
    return build_batch([first, second], np.zeros(4), device=device)


def _make_trial_with_picture(device: torch.device, vision: Vision) -> Batch:
    """A prompt with two pictures, one without and one with one, with two completions each."""
    rng = np.random.default_rng(0)
    pixels = [rng.integers(0, 256, (48, width, 3), dtype=np.uint8) for width in (48, 64)]
    wide, narrow = (vision.reader.read(array, Path(), "the trial picture") for array in pixels)
    excluded = vision.reader.excluded_ids
    ids = np.array([index for index in range(len(excluded) + 32) if index not in excluded][:28]).reshape(4, 7)
    ids[1, 3] = ids[0, 3]
    groups = []
    for start, pictures in enumerate([(wide, narrow), (), (narrow,)]):
        pieces = [piece for picture in pictures for piece in (ids[start, :2], picture.token_ids)]
        prompt = Prompt(np.concatenate([*pieces, ids[3, :3]]), start, pictures=pictures)
        rows = [ids[0, 3:5], ids[1, 3:]] if start == 0 else [ids[2, 2:3], ids[3, 2:5]]
        groups.append(group_prompt(prompt, rows))
    return build_batch(groups, np.zeros(6), device=device)


def are_activations_close(actual: Tensor, expected: Tensor) -> bool:
    """Whether two results agree within the rounding of their dtype."""
    # The absolute tolerance is relative to the largest activation, because a value near 0 has the rounding error of
    # larger terms.
    tolerance = 1e-4 if expected.dtype in (torch.float32, torch.float64) else 5e-2
    finite = expected[expected.isfinite()]  # NaN has no scale, and an infinite scale would accept any difference
    scale = float(finite.abs().max()) if finite.numel() else 1.0
    return bool(torch.allclose(actual.float(), expected.float(), rtol=tolerance, atol=tolerance * max(scale, 1.0)))


def _find_predicting_positions(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return row and column in ``input_ids`` of the positions that predict the tokens under ``loss_mask``, in order."""
    rows, steps = batch.loss_mask.nonzero(as_tuple=True)
    return rows, batch.prompt_lengths[rows] + steps - 1


def _select_predicting_logits(logits: Tensor, batch: Batch) -> Tensor:
    """``[M, V]`` at the predicting positions; a slice where they are one rectangle, as its backward copies nothing."""
    # Equal prompts and completions of equal length: the predicting positions are T columns, from `start` on.
    start, width = int(batch.prompt_lengths[0]) - 1, batch.loss_mask.shape[1]
    if bool((batch.prompt_lengths == start + 1).all()) and bool(batch.loss_mask.all()):
        return logits[:, start : start + width].flatten(0, 1)
    return logits[_find_predicting_positions(batch)]


def _select_rows(values: Tensor, indices: Tensor) -> Tensor:
    """Return ``values[indices]``, with a gradient that is the same in every run although indices repeat.

    The gradient of indexing adds in parallel on a CPU, in an order that depends on the load; on a GPU it sorts first.
    The gradient of ``index_select`` adds in the order of the indices on a CPU, and in any order on a GPU.
    """
    return values.index_select(0, indices) if values.device.type == "cpu" else values[indices]


def scatter_to_rectangle(flat: Tensor, mask: Tensor) -> Tensor:
    """Put the values ``[M]`` where ``mask [N, T]`` is True, and zeros elsewhere; differentiable."""
    return torch.zeros(mask.shape, dtype=flat.dtype, device=flat.device).masked_scatter(mask, flat)


def split_model(model: nn.Module, *, is_tried: bool = False) -> SplitModel | None:
    """Split the model into decoder and head; None, with the reason in the log, if they do not give the model's logits.

    With ``is_tried``, an earlier trial has succeeded, and the model does not run.
    """
    adapted: Any = model
    base = adapted.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(base, transformers.PreTrainedModel):
        return None
    head: Any = base.get_output_embeddings()  # type: ignore[no-untyped-call]
    decoder = base.base_model
    if type(head) is not nn.Linear or decoder is base:
        logger.info("%s: its output layer is not a plain linear one; logits are materialised", type(base).__name__)
        return None
    config = base.config.get_text_config()
    # Cohere multiplies logits by logit_scale; Granite divides them by logits_scaling.
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    softcap = getattr(config, "final_logit_softcapping", None)
    split = SplitModel(decoder, head, scale, None if softcap is None else float(softcap))
    if not is_tried and not _gives_same_logits(base, split):
        logger.info(
            "%s: its logits are not a linear map of its hidden states; they are materialised", type(base).__name__
        )
        return None
    return split


@torch.no_grad()
def _gives_same_logits(model: transformers.PreTrainedModel, split: SplitModel) -> bool:
    """Whether head(decoder(x)) equals model(x) on a few tokens."""
    device = split.head.weight.device
    input_ids = torch.arange(1, 5, device=device)[None] % split.head.weight.shape[0]
    was_training = model.training
    # Trained float32 biases or embeddings beside frozen bfloat16 layers need autocast, in which such a model is used. A
    # model of one dtype is tried in the autocast that the caller may have set.
    is_mixed = len({parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}) > 1
    model.eval()  # type: ignore[no-untyped-call]
    try:
        with set_autocast(device, torch.bfloat16 if is_mixed else None):
            expected = model(input_ids=input_ids, use_cache=False).logits[0].float()
            hidden = split.decoder(input_ids=input_ids, use_cache=False).last_hidden_state[0]
    finally:
        model.train(was_training)
    # Logits in the way of OutputHead: product, scale, softcap.
    logits = nn.functional.linear(hidden.to(split.head.weight.dtype), split.head.weight, split.head.bias).float()
    logits = logits * split.scale
    if split.softcap is not None:
        logits = split.softcap * torch.tanh(logits / split.softcap)
    return are_activations_close(logits, expected)
