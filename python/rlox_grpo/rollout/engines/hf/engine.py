"""The engine ``hf``: sample from a transformers model or any module, in the trainer's process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlox_grpo.errors import ConfigError
from rlox_grpo.model.blank import find_device
from rlox_grpo.model.float32_head import float32_logits
from rlox_grpo.model.load import find_max_positions
from rlox_grpo.model.routing import find_routers
from rlox_grpo.model.vision import make_vision
from rlox_grpo.prompts.pictures import PictureReader
from rlox_grpo.rollout.engines.calls import Limits, make_groups
from rlox_grpo.rollout.engines.hf.decoding import (
    can_decode_with_cache,
    decode_with_cache,
    decode_without_cache,
    find_faster_cache,
    find_graphs,
    in_evaluation,
)
from rlox_grpo.rollout.engines.hf.live_rows import Key, LiveRows, NonFiniteLogitsError, Row, RowId
from rlox_grpo.rollout.engines.hf.shared_prefix import SharedPrefixCache
from rlox_grpo.rollout.engines.hf.slot_cache import SlotCache
from rlox_grpo.rollout.engines.hf.turns import TurnDecoder
from rlox_grpo.rollout.engines.sampling import draw_row_uniforms
from rlox_grpo.rollout.engines.stop_strings import StopStrings
from rlox_grpo.rollout.engines.turns import TurnRequest
from rlox_grpo.rollout.engines.weight_sync import collect_weights
from rlox_grpo.types import Prompt, RolloutGroup, Sampling

__all__ = ["HFEngine", "NonFiniteLogitsError"]

# Rows decoded at once by default, which bounds the key-value cache.
DEFAULT_MAX_ROWS = 256

# In float32 the keys of prompts of at most this many tokens are copied to each row: reading the copies takes less
# time than a second call of the attention kernel. In bfloat16 they are not copied, because rows with copies drew
# other tokens than in float32.
_COPIED_TOKENS = 8

logger = logging.getLogger(__name__)


class HFEngine:
    """Samples completions from a transformers causal LM or any module with ``forward(input_ids) -> logits``.

    The engine uses the trainer's module itself, so an update needs no copy. A transformers decoder runs with a
    key-value cache and continuous batching. Any other module, and a transformers model with more state than keys and
    values (Mamba), runs the whole sequence again for each token, with ``input_ids`` as the only argument; rows of equal
    length run together.

    The uniform random number of a token is keyed by (seed, index of the prompt in the step, index of the completion in
    its group, index of the token). The number therefore does not depend on ``max_rows``, on other rows, or on the
    number of ranks. Logits do depend on the batch in their last bits, so a token may change if its number is within
    about 1e-7 of the boundary between two tokens.

    Log-probs are those of the sampled distribution: after temperature and filters, renormalised; 0.0 at temperature 0.
    Without filters they are the trainer's log_softmax(logits / temperature); with filters, the trainer normalises over
    the ids of the completion's sampling mask.

    Attributes:
        exact, takes_weights, policy_version, max_length: see :class:`rlox_grpo.rollout.engines.GenerationEngine`.
        returns_sampling_mask: see :func:`rlox_grpo.rollout.engines.returns_mask`.
        returns_experts: whether it returns the experts of a mixture, if ``Sampling.return_experts`` asks for them.
        vocab_limit: ids from here on are never sampled, because they have no text. Log-probs are normalised over the
            ids below it. None: every id can be sampled.
        uses_cache: whether the model runs with a key-value cache.
        shares_prefixes: whether the rows of a group can share one copy of their prompt's keys and values. Rows share
            the copy unless the group has one row, or a sequence may be longer than the model's sliding window.
        end_ids: ids that end a completion.
        uses_slots: whether rows decode without padding on a GPU (:mod:`.slot_cache`).
        uses_graphs: whether these steps are replayed as CUDA graphs (:mod:`.step_graphs`).
    """

    returns_sampling_mask = True

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        *,
        eos_token_ids: Sequence[int] | None = None,
        vocab_limit: int | None = None,
        max_rows: int | None = None,
        autocast_dtype: torch.dtype | None = None,
        takes_weights: bool = False,
        cuda_graphs: bool = True,
        reader: PictureReader | None = None,
        fp32_lm_head: bool = False,
    ) -> None:
        """Store the model; nothing is allocated before ``generate``.

        Args:
            model: the trainer's model, or a copy; its training mode is restored after each call.
            tokenizer: decodes completions, and is needed for stop strings; may be None.
            eos_token_ids: ids that end a completion; by default those of the model's generation config, its config and
                the tokenizer. Without any, completions have ``max_new_tokens`` tokens.
            vocab_limit: ids from here on are never sampled; by default the ids after the tokenizer's last.
            max_rows: number of completions decoded at a time, 256 by default.
            autocast_dtype: run the forward under ``torch.autocast`` in this dtype (``torch.bfloat16``).
            takes_weights: ``model`` is a copy of the trainer's, and ``load_weights`` writes into it.
            cuda_graphs: replay decoding steps on a GPU as CUDA graphs, if a test of a few steps gives equal logits.
            reader: reads the pictures of prompts; ids of pictures and videos are never sampled then.
            fp32_lm_head: keep the output layer's products in float32 where ``autocast_dtype`` has 16 bits.

        Raises:
            ValueError: ``max_rows`` is below 1.
            ConfigError: there is a ``reader``, and the model takes no pictures or decodes without a cache.
        """
        if max_rows is not None and max_rows < 1:
            raise ValueError(f"max_rows is {max_rows}, expected at least 1")
        self._model = model
        self._tokenizer = tokenizer
        self._max_rows = DEFAULT_MAX_ROWS if max_rows is None else max_rows
        self._autocast_dtype = autocast_dtype
        self._fp32_lm_head = fp32_lm_head
        self.takes_weights = takes_weights
        self.max_length = find_max_positions(model)
        self._limits = Limits(_find_vocab_size(model), self.max_length, has_tokenizer=tokenizer is not None)
        self.end_ids = _find_end_ids(model, tokenizer) if eos_token_ids is None else tuple(eos_token_ids)
        self.vocab_limit = vocab_limit
        if tokenizer is not None and vocab_limit is None:
            limit = max(tokenizer.get_vocab().values()) + 1
            if self._limits.vocab_size is None or self._limits.vocab_size > limit:
                self.vocab_limit = limit
        self.uses_cache = can_decode_with_cache(model)
        if not self.uses_cache and hasattr(model, "config"):
            logger.warning(
                "%s has more state than keys and values: the whole sequence is run again for each token, which is slow",
                type(model).__name__,
            )
        self._vision = make_vision(model, reader)
        if self._vision is not None and not self.uses_cache:
            raise ConfigError(
                f"processor: {type(model).__name__} has more state than keys and values, and pictures need a model "
                "without such a state: pass a tokenizer without a processor"
            )
        faster = find_faster_cache(model, autocast_dtype, self._vision) if self.uses_cache else None
        self.shares_prefixes, self.uses_slots = faster is SharedPrefixCache, faster is SlotCache
        self.uses_graphs = cuda_graphs and self.uses_slots and find_graphs(model, autocast_dtype)
        self._routers = find_routers(model) if self.uses_cache else None
        self.returns_experts = self._routers is not None
        self.exact = autocast_dtype is None
        self.policy_version = 0

    def generate(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, seed: int, *, first_prompt: int = 0
    ) -> list[RolloutGroup]:
        """Sample ``group_size`` completions for each prompt; ``prompts[0]`` has the index ``first_prompt`` in its step.

        Raises:
            ValueError: see :class:`~rlox_grpo.rollout.engines.calls.Limits`.
            NonFiniteLogitsError: The model's logits are not finite; the message names the prompt and the token.
        """
        self._limits.check_prompts(prompts, group_size, sampling, seed)
        if self._vision is None and (shown := [prompt for prompt in prompts if prompt.pictures]):
            raise ValueError(f"{shown[0].name} has pictures, and this engine has no processor: the model is text only")
        token_ids = [np.asarray(prompt.token_ids, dtype=np.int64) for prompt in prompts]
        max_rows = min(self._max_rows, len(prompts) * group_size)
        longest = max(len(prompt) for prompt in token_ids)
        copies_prompts = self.exact and longest <= _COPIED_TOKENS
        share_prefixes = self.shares_prefixes and group_size > 1 and not copies_prompts
        # Attention to shared keys has no mask for a sliding window, so no row may be longer than the window.
        if share_prefixes:
            share_prefixes = longest + sampling.max_new_tokens <= _find_sliding_window(self._model)
        decode_rows: Any = decode_without_cache
        if self.uses_cache:
            decode_rows = partial(
                decode_with_cache,
                share_prefixes=share_prefixes,
                use_slots=self.uses_slots,
                use_graphs=self.uses_graphs and not sampling.return_experts,
                routers=self._routers if sampling.return_experts else None,
                vision=self._vision,
                pictures=[prompt.pictures for prompt in prompts],
            )

        def describe(id: RowId) -> Row:
            # float64 [max_new_tokens]. Example: token 7 of completion 1 of prompt 3 always gets number 7 of the stream
            # whose counter begins at (turn 0, completion 1, prompt 3), whichever row it decodes in and whatever other
            # rows there are.
            uniforms = draw_row_uniforms(seed, first_prompt + id.prompt, id.completion, sampling.max_new_tokens)
            return Row(f"prompts[{id.prompt}], completion token", uniforms, sampling.stop)

        with in_evaluation(self._model), self._autocast():
            rows = self._live_rows(max_rows, sampling, describe)
            decode_rows(self._model, token_ids, group_size, rows, max_rows)
        ids = [RowId(prompt, index) for prompt in range(len(prompts)) for index in range(group_size)]
        completions = [rows.finished[id] for id in ids]
        return make_groups(prompts, completions, self._tokenizer, self.policy_version)

    @contextmanager
    def open_turns(self, sampling: Sampling, seed: int, max_episodes: int) -> Iterator[TurnDecoder]:
        """Sample replies turn by turn; keys and values are kept between an episode's turns.

        Raises:
            ValueError: a sampling value out of its range, or stop strings without a tokenizer.
        """
        self._limits.check_sampling(sampling, seed)

        def describe(request: TurnRequest) -> Row:
            # The numbers are keyed by the episode and the draw, so that a turn does not depend on the progress of
            # other episodes.
            uniforms = draw_row_uniforms(seed, *request.episode, request.max_new_tokens, request.draw)
            name = f"prompts[{request.episode[0]}], turn {request.turn}, token"
            return Row(name, uniforms, (*sampling.stop, *request.stop))

        with in_evaluation(self._model):
            yield TurnDecoder(
                self._model,
                self._live_rows(min(self._max_rows, max_episodes), sampling, describe),
                self._limits,
                autocast=self._autocast,
                window=_find_sliding_window(self._model) if self.uses_cache else None,
                vision=self._vision,
            )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy the weights if the engine ``takes_weights``, and set the version.

        Raises:
            ValueError: the names or shapes are not those of the copy. The weights before it have changed then, and the
                version has not.
        """
        if self.takes_weights:
            _copy_weights(self._model, weights)
        self.policy_version = version

    def close(self) -> None:
        """Do nothing, because caches exist only during ``generate``."""

    def _live_rows(self, max_rows: int, sampling: Sampling, describe: Callable[[Key], Row]) -> LiveRows[Key]:
        end_ids = [*self.end_ids, *sampling.stop_token_ids]
        return LiveRows(
            max_rows,
            sampling,
            describe,
            end_ids=torch.tensor(end_ids, dtype=torch.long, device=find_device(self._model)),
            make_stop_strings=self._make_stop_strings,
            vocab_limit=self.vocab_limit,
            excluded_ids=() if self._vision is None else self._vision.reader.excluded_ids,
        )

    def _make_stop_strings(self, stop: tuple[str, ...]) -> StopStrings:
        vocabulary = max(self._tokenizer.get_vocab().values()) + 1
        return StopStrings(self._tokenizer, stop, vocabulary, find_device(self._model))

    @contextmanager
    def _autocast(self) -> Iterator[None]:
        if self._autocast_dtype is None:
            yield
            return
        head = float32_logits(self._model, self._autocast_dtype) if self._fp32_lm_head else nullcontext()
        with torch.autocast(find_device(self._model).type, dtype=self._autocast_dtype), head:
            yield


@torch.no_grad()
def _copy_weights(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copy each weight as it comes, in one pass: a weight may be gathered from all ranks or merged for it alone."""
    engine_weights = dict(collect_weights(model))
    missing = set(engine_weights)
    for name, tensor in weights:
        if name not in missing:
            raise ValueError(f"{name} is {'there twice' if name in engine_weights else 'no weight of the engine'}")
        if tensor.shape != engine_weights[name].shape:
            expected = tuple(engine_weights[name].shape)
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, and {expected} in the engine")
        engine_weights[name].copy_(tensor)
        missing.remove(name)
    if missing:
        raise ValueError(f"the engine has weights that did not come: {', '.join(sorted(missing)[:4])}")


def _find_vocab_size(model: nn.Module) -> int | None:
    """Return the number of rows of a transformers model's input embedding; None for a plain module."""
    if not hasattr(model, "get_input_embeddings"):
        return None
    embeddings: Any = model.get_input_embeddings  # peft and transformers alike
    return int(embeddings().weight.shape[0])


def _find_sliding_window(model: nn.Module) -> float:
    """Tokens that every layer attends to; infinite without a sliding window."""
    config: Any = model.config
    window = getattr(config.get_text_config(decoder=True), "sliding_window", None)
    return float("inf") if window is None else window


def _find_end_ids(model: nn.Module, tokenizer: Any) -> tuple[int, ...]:
    """End tokens of the generation config, the config and the tokenizer, all of them: chat models have several."""
    sources = (getattr(model, "generation_config", None), getattr(model, "config", None), tokenizer)
    end_ids: set[int] = set()
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        end_ids.update([ids] if isinstance(ids, int) else ids or [])
    return tuple(sorted(end_ids))
