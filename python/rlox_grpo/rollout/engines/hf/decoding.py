"""Decoding loops: with a key-value cache, and without one."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from rlox_grpo.model.forward import are_activations_close, can_pack, split_model
from rlox_grpo.model.routing import Routers
from rlox_grpo.model.vision import Vision
from rlox_grpo.rollout.engines.hf.cache_argument import find_cache_argument, run_with_cache, takes
from rlox_grpo.rollout.engines.hf.kv_cache import PrefilledPrompts, RowCache
from rlox_grpo.rollout.engines.hf.live_rows import LiveRows, RowId
from rlox_grpo.rollout.engines.hf.shared_lines import SharedLines
from rlox_grpo.rollout.engines.hf.shared_prefix import SharedPrefixCache
from rlox_grpo.rollout.engines.hf.slot_cache import SlotCache
from rlox_grpo.rollout.engines.hf.step_graphs import StepGraphs, can_capture
from rlox_grpo.rollout.engines.sampling import sample_tokens
from rlox_grpo.types import Int64Array, Picture

logger = logging.getLogger(__name__)

# Maximum padded tokens of one prefill, which bounds its activations.
PREFILL_TOKENS = 16384
# Free rows are refilled together, once they are this share of all rows. To prefill each prompt alone would take a
# forward pass for each; to wait longer would leave rows empty.
_REFILL_FRACTION = 1 / 8


def can_decode_with_cache(model: nn.Module) -> bool:
    """Whether the model is a transformers decoder whose only state is keys and values by position."""
    if getattr(model, "config", None) is None or not takes(model, "attention_mask", "position_ids"):
        return False
    if find_cache_argument(model) is None:
        return False
    config: Any = model.config
    layers = DynamicCache(config=config).layers
    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)


def decode_with_cache(
    model: nn.Module,
    prompts: Sequence[Int64Array],
    group_size: int,
    rows: LiveRows[RowId],
    max_rows: int,
    *,
    share_prefixes: bool = False,
    use_slots: bool = False,
    use_graphs: bool = False,
    vision: Vision | None = None,
    pictures: Sequence[tuple[Picture, ...]] = (),
    routers: Routers | None = None,
) -> None:
    """Sample every row with continuous batching: a waiting row takes the place of a finished one.

    The model runs each prompt once. The rows of a group share its keys and values, or each row gets a copy. Rows that
    have sampled the same tokens so far are decoded as one row. The longest prompts start first: prompts of one prefill
    then have similar lengths, and a later prompt always fits into the columns of the live rows. With ``use_graphs``,
    steps over slots are replayed as CUDA graphs. ``pictures`` are the pictures of each prompt; (): none. With
    ``routers``, the rows note the experts of each token; hooks record them, which a CUDA graph would not run.
    """
    watch = nullcontext if routers is None else routers.watch

    # Three numberings: ids of completions (RowId), live rows (0, 1, … without gaps) and lines of the cache. Rows of
    # one prompt that have sampled the same tokens share one line; `lines` maps rows to lines.
    def prefill_prompts(indices: Sequence[int]) -> PrefilledPrompts:
        shown = [pictures[index] for index in indices] if pictures else ()
        asked = [prompts[index] for index in indices]
        with watch():
            prefilled = prefill(model, asked, rows.device, vision=vision, pictures=shown)
        if routers is None:
            return prefilled
        chosen = routers.last.spread((len(asked), prefilled.width)).cpu().numpy()  # [P, width, layers, k]
        starts = prefilled.width - prefilled.lengths if prefilled.padded_left else np.zeros_like(prefilled.lengths)
        bounds = zip(chosen, starts.tolist(), prefilled.lengths.tolist(), strict=True)
        return replace(prefilled, experts=[line[start : start + length] for line, start, length in bounds])

    waiting = _WaitingRows(prefill_prompts, prompts, group_size)
    kind = SlotCache if use_slots else SharedPrefixCache if share_prefixes else RowCache
    cache: RowCache | SharedPrefixCache | SlotCache = kind(max_rows, rows.device)
    lines = SharedLines(cache, rows.device)
    graphs = StepGraphs(model, cache) if use_graphs and isinstance(cache, SlotCache) else None
    while waiting or len(rows):
        first, free = 0, max_rows - len(rows)
        if waiting and (free >= max_rows * _REFILL_FRACTION or not len(rows)):
            # The first token of the new rows is drawn from the prefill's logits: the cache has their prompts, but not
            # yet this token.
            ids, prefilled, which = waiting.take(free)
            lines.add_rows(prefilled, which)
            first = rows.add(ids)
            if prefilled.experts is not None:
                rows.note_experts([prefilled.experts[prompt] for prompt in which], first=first)
            logits = prefilled.logits[torch.from_numpy(which).to(rows.device)]  # [new rows, V]
        else:
            cache.make_room()
            # int64 [lines, 1]: the model runs once for each line.
            newest = lines.tokens(rows.last_tokens())
            with watch():
                if graphs is None:
                    logits = run_with_cache(model, input_ids=newest, **cache.model_options()).logits[:, -1]
                else:
                    logits = graphs.run(newest)
            cache.advance()
            if routers is not None:
                rows.note_experts(list(lines.logits(routers.last.spread(newest.shape)).cpu().numpy()))
            # [lines, V] → [rows, V]: rows of one line have the same logits and draw with their own random numbers.
            logits = lines.logits(logits)
        tokens = sample_tokens(rows.limit(logits), rows.next_uniforms(first), rows.sampling)
        rows.append(*tokens, first=first)
        moved = rows.retire()
        if moved is not None:
            lines.move_rows(*moved, remaining=len(rows))
        if len(rows):
            # The lines are split after finished rows have left, so that a line is copied only for rows that continue.
            lines.split(rows.last_tokens())


def find_faster_cache(
    model: nn.Module, autocast: torch.dtype | None = None, vision: Vision | None = None
) -> type[SharedPrefixCache | SlotCache] | None:
    """Find a faster cache that gives the same logits as a `RowCache` in a test step; None if there is none.

    On a CPU the result is a `SharedPrefixCache`, because only the CPU's attention kernel takes a mask and returns its
    log normalisers. On a GPU it is a `SlotCache`, because only the GPU's kernels take the position of each row's keys.
    ``autocast`` is the dtype of generation, in which the test on a GPU runs. With ``vision`` the model takes pictures.
    """
    kind: type[SharedPrefixCache | SlotCache] = SlotCache
    if all(parameter.device.type == "cpu" for parameter in model.parameters()):
        kind, autocast = SharedPrefixCache, None
    split = split_model(model)
    if split is None or not can_pack(split, autocast, vision=vision):
        return None
    return kind if _gives_same_logits(model, kind, split.head.weight, autocast) else None


def find_graphs(model: nn.Module, autocast: torch.dtype | None = None) -> bool:
    """Whether decoding steps can be replayed as CUDA graphs, by a test of a few steps.

    The function is called after `find_faster_cache` has returned `SlotCache`.
    """
    split = split_model(model, is_tried=True)
    assert split is not None
    head = split.head.weight
    ids = np.arange(5) % head.shape[0]
    with in_evaluation(model), nullcontext() if autocast is None else torch.autocast(head.device.type, autocast):
        return can_capture(model, prefill(model, [ids[:3], ids[3:]], head.device), head)


@contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """Turn on evaluation mode without gradients; restore the mode of every submodule at exit, even after an error.

    The context uses ``no_grad``, not ``inference_mode``: a buffer that the forward pass replaces (dynamic RoPE) would
    become an inference tensor, and the backward pass of the update raises on inference tensors.
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def _gives_same_logits(
    model: nn.Module, kind: type[SharedPrefixCache | SlotCache], head: Tensor, autocast: torch.dtype | None
) -> bool:
    # Two prompts, 0 1 2 and 3 4, and rows 0 | 1 1: unequal lengths and a shared prompt, which the caches treat
    # differently.
    ids = np.arange(5) % head.shape[0]
    which = np.array([0, 1, 1])
    try:
        with in_evaluation(model), nullcontext() if autocast is None else torch.autocast(head.device.type, autocast):
            prefilled = prefill(model, [ids[:3], ids[3:]], head.device)
            logits = []
            for each in (RowCache, kind):
                cache: RowCache | SharedPrefixCache | SlotCache = each(len(which), head.device)
                cache.add_rows(prefilled, which)
                cache.make_room()
                newest = torch.from_numpy(which[:, None]).to(head.device)
                logits.append(run_with_cache(model, input_ids=newest, **cache.model_options()).logits)
    except (ValueError, TypeError, RuntimeError, IndexError, KeyError, AttributeError) as error:
        logger.info("%s copies prompts to their rows when it samples: %s", type(model).__name__, error)
        return False
    actual, expected = (tensor if autocast is None else tensor.to(autocast) for tensor in reversed(logits))
    return are_activations_close(actual, expected)


class _WaitingRows:
    """Rows not yet started, longest prompt first. A prompt is prefilled when its first row starts."""

    def __init__(
        self, prefill: Callable[[Sequence[int]], PrefilledPrompts], prompts: Sequence[Int64Array], group_size: int
    ) -> None:
        self._prefill = prefill
        self._prompts = prompts
        self._group_size = group_size
        self._order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
        self._batch: list[int] = []  # prompts of the last prefill
        self._prefilled: PrefilledPrompts | None = None
        self._num_taken = 0  # rows of that prefill already given

    def __bool__(self) -> bool:
        return bool(self._order) or self._num_taken < len(self._batch) * self._group_size

    def take(self, free: int) -> tuple[list[RowId], PrefilledPrompts, Int64Array]:
        """Return at least 1 and at most ``free`` rows of one prefill. Row i continues its prompt ``which[i]``."""
        if self._prefilled is None or self._num_taken == len(self._batch) * self._group_size:
            # As many prompts as fill the free rows, within the budget of padded tokens. The longest remaining prompt is
            # first.
            wanted = min(-(-free // self._group_size), PREFILL_TOKENS // len(self._prompts[self._order[0]]))
            self._batch, self._order = self._order[: max(1, wanted)], self._order[max(1, wanted) :]
            self._prefilled = self._prefill(self._batch)
            self._num_taken = 0
        rows = np.arange(self._num_taken, min(self._num_taken + free, len(self._batch) * self._group_size))
        self._num_taken += len(rows)
        # The rows are prompt-major: with groups of 4, row 6 of the prefill is completion 2 of its prompt 1.
        which, completion = np.divmod(rows, self._group_size)
        ids = [RowId(self._batch[prompt], int(index)) for prompt, index in zip(which, completion, strict=True)]
        return ids, self._prefilled, which


def decode_without_cache(
    model: nn.Module, prompts: Sequence[Int64Array], group_size: int, rows: LiveRows[RowId], max_rows: int
) -> None:
    """Sample every row by running its whole sequence again for each token.

    Rows with equal prompt lengths form a batch. The rows stay equally long, so the model needs neither padding nor a
    mask: ``input_ids`` is its only input.
    """
    by_length: defaultdict[int, list[int]] = defaultdict(list)
    for index, prompt in enumerate(prompts):
        by_length[len(prompt)].append(index)
    for indices in by_length.values():
        waiting = [RowId(prompt, completion) for prompt in indices for completion in range(group_size)]
        for start in range(0, len(waiting), max_rows):
            _decode_rectangle(model, prompts, waiting[start : start + max_rows], rows)


def _decode_rectangle(model: nn.Module, prompts: Sequence[Int64Array], ids: list[RowId], rows: LiveRows[RowId]) -> None:
    # A prompt runs once; `which [rows]` maps its logits to the rows of its group.
    distinct = sorted({id.prompt for id in ids})
    which = torch.tensor([distinct.index(id.prompt) for id in ids], device=rows.device)
    prefix = torch.from_numpy(np.stack([prompts[index] for index in distinct])).to(rows.device)  # [prompts, L]
    logits = select_last_logits(model(prefix)).index_select(0, which)
    sequences = prefix.index_select(0, which)  # [rows, L]
    rows.add(ids)
    while True:
        rows.append(*sample_tokens(rows.limit(logits), rows.next_uniforms(), rows.sampling))
        sequences = torch.cat([sequences, rows.last_tokens()], dim=1)
        moved = rows.retire()
        if moved is not None:
            to, source = (torch.from_numpy(index).to(rows.device) for index in moved)
            sequences[to] = sequences[source]
            sequences = sequences[: len(rows)]
        if not len(rows):
            return
        logits = select_last_logits(model(sequences))


def select_last_logits(output: Any) -> Tensor:
    """Return the logits of the last position, ``[rows, V]``, from a model's output or from logits ``[rows, L, V]``."""
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    return logits[:, -1]


def prefill(
    model: nn.Module,
    prompts: Sequence[Int64Array],
    device: torch.device,
    *,
    vision: Vision | None = None,
    pictures: Sequence[tuple[Picture, ...]] = (),
) -> PrefilledPrompts:
    """Run each prompt once, padded on the left on a CPU.

    On a GPU prompts are padded on the right. No token then attends to padding, so no mask is needed. With padding on
    the left, padding tokens would attend to nothing, and some kernels return NaN for such tokens.

    ``pictures`` are the pictures of each prompt; (): none.
    """
    padded_left = device.type == "cpu"
    lengths = np.array([len(prompt) for prompt in prompts], dtype=np.int64)
    width = int(lengths.max())
    # [P, width]. Example: prompts `5 6 7` and `8`. Padded on the left, the second row is `_ _ 8` with positions `0 0
    # 0`; padded on the right, it is `8 _ _`.
    input_ids = np.zeros((len(prompts), width), dtype=np.int64)
    for row, prompt in enumerate(prompts):
        start = width - len(prompt) if padded_left else 0
        input_ids[row, start : start + len(prompt)] = prompt
    options: dict[str, Any] = {}
    if padded_left:
        padding = (width - lengths)[:, None]
        options["position_ids"] = torch.from_numpy(np.maximum(np.arange(width) - padding, 0)).to(device)
        if padding.any():
            options["attention_mask"] = torch.from_numpy(np.arange(width) >= padding).to(device)
    # If every prompt ends in the last column, the model computes logits [P, 1, V] there. Otherwise `last [P]` selects
    # the columns.
    if (padded_left or (lengths == width).all()) and takes(model, "logits_to_keep"):
        options["logits_to_keep"] = 1
    deltas = None
    if vision is not None and pictures:
        shown = list(zip(prompts, pictures, strict=True))
        options |= vision.prepare_rows(shown, width, padded_left=padded_left)
        deltas = np.array([vision.locate(row)[1] for row in shown], dtype=np.int64)
    # Without the config every layer keeps all positions; with it, layers with a sliding window would drop some.
    cache = DynamicCache()
    last = None if padded_left or "logits_to_keep" in options else torch.from_numpy(lengths - 1).to(device)
    with nullcontext() if last is None else _only_last_logits(model, last):
        output = run_with_cache(model, cache=cache, input_ids=torch.from_numpy(input_ids).to(device), **options)
    logits: Tensor = output.logits
    if last is not None and logits.shape[1] > 1:  # a model that does not call its output layer
        logits = logits[torch.arange(len(last), device=device), last][:, None]
    layers: list[Any] = cache.layers
    return PrefilledPrompts(
        keys=[layer.keys for layer in layers],
        values=[layer.values for layer in layers],
        logits=logits[:, -1].clone(),  # a view would keep the logits of the whole prompt
        lengths=lengths,
        padded_left=padded_left,
        deltas=deltas,
    )


@contextmanager
def _only_last_logits(model: Any, last: Tensor) -> Iterator[None]:
    """Run the output layer on one hidden state of each row, at position ``last [P]``."""

    def select(head: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, *others = arguments
        return hidden[torch.arange(len(last), device=hidden.device), last][:, None], *others

    if (head := model.get_output_embeddings()) is None:
        yield
        return
    handle = head.register_forward_pre_hook(select)
    try:
        yield
    finally:
        handle.remove()
