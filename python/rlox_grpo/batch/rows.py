"""Rows of an optimizer step as flat arrays, and their layout as batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import rlox_grpo._native as _native
from rlox_grpo.batch.pictures import mark_pictures
from rlox_grpo.batch.ragged import check_at_least, concatenate
from rlox_grpo.batch.sampling_mask import find_outside, join_masks
from rlox_grpo.groups import count_turns, find_pictures, find_prompt_ids, list_rows, mark_sampled, number_turns
from rlox_grpo.types import (
    ORIGINS,
    Batch,
    BoolArray,
    Branches,
    Completion,
    EnvironmentTokens,
    Float32Array,
    Int16Array,
    Int32Array,
    Int64Array,
    Picture,
    PolicyWeights,
    RolloutGroup,
    Routing,
    SamplingMask,
    ScoredGroup,
    StepTotals,
    TokenLogProbs,
)

if TYPE_CHECKING:
    import torch

DEMONSTRATION, REPLAY = ORIGINS.index("demonstration"), ORIGINS.index("replay")


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of an optimizer step: arrays over all tokens with offsets, and arrays over rows.

    ``sampled`` is None if the policy sampled every token. ``advantages`` have one value for each row, or for each token
    if ``by_token``. A completion has one row, and one more for each branch: ``completion_indices`` is the completion of
    each row, ascending, and ``branch_indices`` is 0 for the completion itself and b for its branch b. ``observed``
    marks the tokens of ``Batch.environment``; None: the marks are not requested. ``pictures`` are the pictures of each
    row. ``sampling_mask`` is the sampling mask of all tokens; None: all ids. ``experts`` are the experts of each
    row, ``[P + T, layers, k]``; (): no row has any. ``origins`` are positions in ``ORIGINS``, ``int8 [N]``.
    """

    prompts: Int64Array
    prompt_offsets: Int64Array
    completions: Int64Array
    completion_offsets: Int64Array
    log_probs: Float32Array
    sampled: BoolArray | None
    prompt_indices: Int64Array
    train: BoolArray
    advantages: Float32Array
    by_token: bool
    completion_indices: Int64Array
    branch_indices: Int64Array
    observed: BoolArray | None = None
    pictures: tuple[tuple[Picture, ...], ...] = ()
    sampling_mask: SamplingMask[Int32Array] | None = None
    experts: tuple[Int16Array | None, ...] = ()
    origins: NDArray[np.int8] | None = None

    @staticmethod
    def collect(
        scored_groups: Sequence[ScoredGroup], advantages: Any, train_truncated: bool, with_environment: bool = False
    ) -> Rows:
        """Collect and check the arguments of :func:`rlox_grpo.batch.build_batch`."""
        groups = [scored.group for scored in scored_groups]
        whole = [completion for group in groups for completion in group.completions]
        completion_rows = [list_rows(completion) for completion in whole]
        completions = [row for rows in completion_rows for row in rows]
        ids, id_offsets = concatenate([c.token_ids for c in completions], np.int64, "completions.token_ids")
        log_probs, log_prob_offsets = concatenate(
            [c.log_probs for c in completions], np.float32, "completions.log_probs"
        )
        _check_log_probs(id_offsets, log_prob_offsets)
        sampled = mark_sampled(completions)
        if is_by_token := isinstance(advantages, list) and all(isinstance(values, np.ndarray) for values in advantages):
            rows = _check_token_advantages(advantages, whole)
        else:
            rows = _check_advantages(advantages, whole)
        completion_indices = np.repeat(
            np.arange(len(whole)), np.array([len(rows) for rows in completion_rows], np.int64)
        )
        prompt_ids, prompt_indices, pictures = _list_prompts(groups)
        prompts, prompt_offsets = concatenate(prompt_ids, np.int64, "prompts.token_ids")
        origins = np.array([ORIGINS.index(c.origin) for c in completions], np.int8)
        # The loss of demonstrations has a mask and a denominator of its own.
        train = np.array([train_truncated or c.finish_reason != "length" for c in completions], np.bool_)
        train &= origins != DEMONSTRATION
        return Rows(
            prompts=prompts,
            prompt_offsets=prompt_offsets,
            completions=ids,
            completion_offsets=id_offsets,
            log_probs=log_probs,
            sampled=sampled,
            prompt_indices=prompt_indices,
            train=train,
            advantages=rows
            if is_by_token
            else rows[completion_indices]
            if rows.ndim == 1
            else _spread_over_tokens(rows, whole),
            by_token=is_by_token or rows.ndim == 2,
            completion_indices=completion_indices,
            branch_indices=np.array([branch for rows in completion_rows for branch in range(len(rows))], np.int64),
            observed=_mark_observed(sampled, id_offsets, train) & ~_mark_shown(groups) if with_environment else None,
            pictures=tuple(pictures) if any(pictures) else (),
            sampling_mask=_join_checked(completions, ids, id_offsets),
            experts=_check_experts(completions, np.diff(prompt_offsets)[prompt_indices] + np.diff(id_offsets)),
            origins=origins if origins.any() else None,
        )

    @property
    def count(self) -> int:
        """N, the rows of the step: its completions and their branches."""
        return len(self.train)

    def count_tokens(self, rows: Sequence[int]) -> int:
        """Count the tokens of rows of one prompt; the prompt is counted once."""
        prompt = self.prompt_indices[rows[0]]
        completions = sum(self.completion_offsets[row + 1] - self.completion_offsets[row] for row in rows)
        return int(self.prompt_offsets[prompt + 1] - self.prompt_offsets[prompt] + completions)

    def split_groups(self, token_budget: int) -> list[list[int]]:
        """Split each group's rows into parts within the budget."""
        completion_lengths = np.diff(self.completion_offsets).tolist()
        row_groups: list[list[int]] = []
        tokens, prompt = 0, -1
        for row, (row_prompt, length) in enumerate(zip(self.prompt_indices.tolist(), completion_lengths, strict=True)):
            if row_prompt == prompt and tokens + length <= token_budget:
                row_groups[-1].append(row)
                tokens += length
            else:  # a new part has its own copy of the prompt
                row_groups.append([row])
                tokens, prompt = self.count_tokens([row]), row_prompt
        return row_groups

    def count_totals(self, num_loss_tokens: float | None = None, num_sequences: float | None = None) -> StepTotals:
        """Return the denominators of the step; an argument replaces what is counted."""
        tokens = self._count_loss_tokens()
        return StepTotals(
            float(tokens.sum()) if num_loss_tokens is None else num_loss_tokens,
            float(np.count_nonzero(tokens)) if num_sequences is None else num_sequences,
            *self._count_off_policy(),
        )

    def _count_off_policy(self) -> tuple[float, float]:
        """Return the number of tokens of demonstrations, and the number of replayed rows."""
        if self.origins is None:
            return 0.0, 0.0
        demonstrated = np.diff(self.completion_offsets)[self.origins == DEMONSTRATION]
        return float(demonstrated.sum()), float(np.count_nonzero(self.origins == REPLAY))

    def _count_loss_tokens(self) -> Int64Array:
        """Loss tokens of each completion with its branches, ``int64 [completions]``."""
        lengths = np.diff(self.completion_offsets) if self.sampled is None else self._count_by_row(self.sampled)
        return np.bincount(self.completion_indices, weights=lengths * self.train).astype(np.int64)

    def _count_by_row(self, flags: BoolArray) -> Int64Array:
        return np.diff(np.append(0, np.cumsum(flags))[self.completion_offsets])

    def batch(
        self,
        rows: Int64Array,
        totals: StepTotals,
        pad_token_id: int = 0,
        multiple_of: int = 1,
        *,
        device: torch.device | str | None,
    ) -> Batch:
        """Lay out ``rows``, ``int64`` indices in the step, with the denominators ``totals`` of the whole step."""
        import torch

        input_ids, _, completion_ids, completion_mask, loss_mask, prompt_lengths = _native.layout_rows(
            self.prompts,
            self.prompt_offsets,
            self.completions,
            self.completion_offsets,
            self.prompt_indices,
            self.train,
            rows,
            pad_token_id,
            check_at_least(multiple_of, 1, "multiple_of"),
        )
        if self.sampled is not None:
            loss_mask &= self._lay_out(self.sampled, rows, completion_mask)
        width = completion_ids.shape[1]
        log_probs = _native.pad_values(self.log_probs, self.completion_offsets, rows, width, 0.0)

        if self.by_token:
            advantages = _native.pad_values(self.advantages, self.completion_offsets, rows, width, 0.0)
            is_read = loss_mask
            if self.origins is not None:
                is_read = loss_mask | (completion_mask & (self.origins[rows] == DEMONSTRATION)[:, None])
            advantages[~is_read] = 0.0
        else:
            advantages = self.advantages[rows]

        def tensor(array: NDArray[Any]) -> torch.Tensor:
            return torch.from_numpy(array).to(device)

        completion_indices = self.completion_indices[rows]
        environment = branches = None
        if self.observed is not None:
            counts = np.bincount(self.completion_indices, weights=self._count_by_row(self.observed)).astype(np.int64)
            environment = EnvironmentTokens(
                mask=tensor(self._lay_out(self.observed, rows, completion_mask)),
                lengths=tensor(counts[completion_indices]),
            )
        if self.branch_indices.any():
            branches = Branches(
                index=tensor(self.branch_indices[rows]),
                sequence_lengths=tensor(self._count_loss_tokens()[completion_indices]),
            )

        return Batch(
            input_ids=tensor(input_ids),
            prompt_lengths=tensor(prompt_lengths),
            completion_ids=tensor(completion_ids),
            completion_mask=tensor(completion_mask),
            loss_mask=tensor(loss_mask),
            advantages=tensor(advantages),
            row_index=tensor(completion_indices),
            prompt_index=tensor(self.prompt_indices[rows]),
            totals=totals,
            log_probs=TokenLogProbs(
                sampling=tensor(log_probs),
                mask=self._select_mask(rows, completion_mask, tensor),
                origins=None if self.origins is None else tensor(self.origins[rows]),
            ),
            policy=PolicyWeights(routing=Routing(self._lay_out_experts(rows, input_ids.shape, tensor))),
            environment=environment,
            branches=branches,
            pictures=tuple(self.pictures[row] for row in rows.tolist()) if self.pictures else (),
        )

    def _lay_out(self, values: NDArray[Any], rows: Int64Array, completion_mask: BoolArray) -> NDArray[Any]:
        """``[N, T]`` of the values of ``rows``, such as flags; 0 on padding."""
        laid_out = np.zeros(completion_mask.shape, values.dtype)
        # Boolean indexing assigns row by row, which is the order of the values.
        laid_out[completion_mask] = _take_rows(values, self.completion_offsets, rows)
        return laid_out

    def _lay_out_experts(
        self, rows: Int64Array, shape: tuple[int, ...], tensor: Callable[[NDArray[Any]], torch.Tensor]
    ) -> torch.Tensor | None:
        """``int16 [N, L, layers, k]`` of ``rows``; −1 on padding and where the experts of a token are not known."""
        recorded = [experts for experts in self.experts if experts is not None]
        if not recorded:
            return None
        choices = np.full((*shape, *recorded[0].shape[1:]), -1, np.int16)
        for line, row in enumerate(rows.tolist()):
            if (experts := self.experts[row]) is not None:
                choices[line, : len(experts)] = experts
        return tensor(choices)

    def _select_mask(
        self, rows: Int64Array, completion_mask: BoolArray, tensor: Callable[[NDArray[Any]], torch.Tensor]
    ) -> SamplingMask[torch.Tensor] | None:
        """The sampling mask of ``rows`` as tensors, sizes ``int64 [N, T]``."""
        if self.sampling_mask is None:
            return None
        sizes = self.sampling_mask.sizes.astype(np.int64)
        # int64 [rows + 1], where the ids of each row begin.
        offsets = np.append(0, np.cumsum(sizes))[self.completion_offsets]
        token_ids = _take_rows(self.sampling_mask.token_ids, offsets, rows)
        return SamplingMask(tensor(self._lay_out(sizes, rows, completion_mask)), tensor(token_ids))


def _take_rows(values: NDArray[Any], offsets: Int64Array, rows: Int64Array) -> NDArray[Any]:
    """Return the values of ``rows``, one row after the other."""
    bounds = zip(offsets[rows].tolist(), offsets[rows + 1].tolist(), strict=True)
    return np.concatenate([values[:0], *(values[start:stop] for start, stop in bounds)])


def _join_checked(
    completions: Sequence[Completion], token_ids: Int64Array, offsets: Int64Array
) -> SamplingMask[Int32Array] | None:
    """Return the sampling mask of all tokens, or None if no completion has one.

    Raises:
        ValueError: sizes that do not match the tokens or the ids, or a token that is not among its ids.
    """
    masks = [completion.sampling_mask for completion in completions]
    if all(mask is None for mask in masks):
        return None
    for row, (mask, length) in enumerate(zip(masks, np.diff(offsets).tolist(), strict=True)):
        if mask is not None and (
            len(mask.sizes) != length or int(mask.sizes.sum(dtype=np.int64)) != len(mask.token_ids)
        ):
            raise ValueError(
                f"completions[{row}].sampling_mask has {len(mask.sizes)} sizes with the sum {mask.sizes.sum()} and "
                f"{len(mask.token_ids)} ids, but its token_ids has {length}"
            )
    joined = join_masks(masks, np.diff(offsets).tolist())
    outside = find_outside(joined, token_ids)
    if len(outside):
        row = int(np.searchsorted(offsets, outside[0], side="right")) - 1
        raise ValueError(
            f"completions[{row}].sampling_mask: token {outside[0] - offsets[row]} is {token_ids[outside[0]]}, which is "
            "not among the ids from which it was drawn"
        )
    return joined


def _check_experts(completions: Sequence[Completion], lengths: Int64Array) -> tuple[Int16Array | None, ...]:
    """Return the experts of each row; () if no row has any.

    Raises:
        ValueError: not ``[P + T, layers, k]`` of the row's tokens, or layers or k that differ between rows.
    """
    rows = tuple(completion.experts for completion in completions)
    recorded = [experts for experts in rows if experts is not None]
    if not recorded:
        return ()
    for row, (experts, length) in enumerate(zip(rows, lengths.tolist(), strict=True)):
        if experts is not None and experts.shape != (expected := (length, *recorded[0].shape[1:])):
            raise ValueError(
                f"completions[{row}].experts has shape {experts.shape}, expected {expected}: one row for each token of "
                "its prompt and completion"
            )
    return rows


def _mark_observed(sampled: BoolArray | None, offsets: Int64Array, train: BoolArray) -> BoolArray:
    """``bool [sum T]``, True on the tokens of trained rows that follow a sampled token and were not sampled.

    The tokens before a row's first sampled token belong to its prompt, or an earlier row of the episode has them.
    """
    if sampled is None:
        return np.zeros(offsets[-1], np.bool_)
    so_far = np.append(0, np.cumsum(sampled))
    lengths = np.diff(offsets)
    in_row = so_far[1:] - np.repeat(so_far[offsets[:-1]], lengths)  # sampled tokens of the row up to here
    observed: BoolArray = ~sampled & (in_row > 0) & np.repeat(train, lengths)
    return observed


def _list_prompts(
    groups: Sequence[RolloutGroup],
) -> tuple[list[Int64Array], Int64Array, list[tuple[Picture, ...]]]:
    """Return the distinct prompts, the index of each row's prompt, and the pictures of each row.

    A row with ``prompt_ids`` has these ids as its prompt, any other row has the prompt of its group. Prompts of two
    groups are distinct, even if they have the same tokens, because their pictures may differ. Rows with ``prompt_ids``
    share a prompt only if all their pictures are the same.
    """
    prompts: list[Int64Array] = []
    pictures: list[tuple[Picture, ...]] = []
    indices: list[int] = []
    for group in groups:
        last, last_shown = None, None
        for completion in group.completions:
            for row in list_rows(completion):
                token_ids = find_prompt_ids(row, group)
                pictures.append(find_pictures(row, group))
                shown = group.prompt.pictures if row.prompt_ids is None else pictures[-1]
                digests = [picture.digest for picture in shown]
                # Rows of a group mostly have the same array object: compare identities first.
                if last is None or digests != last_shown or not (token_ids is last or np.array_equal(token_ids, last)):
                    prompts.append(token_ids)
                last, last_shown = token_ids, digests
                indices.append(len(prompts) - 1)
    return prompts, np.array(indices, np.int64), pictures


def _mark_shown(groups: Sequence[RolloutGroup]) -> BoolArray:
    """``bool [sum T]``, True on the tokens of pictures in completions, which no model predicts."""
    marks = [
        mark_pictures(np.concatenate([find_prompt_ids(row, group), row.token_ids]), row.pictures)[-len(row.token_ids) :]
        if row.pictures
        else np.zeros(len(row.token_ids), np.bool_)
        for group in groups
        for completion in group.completions
        for row in list_rows(completion)
    ]
    return np.concatenate([np.zeros(0, np.bool_), *marks])


def _check_log_probs(id_offsets: Int64Array, log_prob_offsets: Int64Array) -> None:
    lengths, expected = np.diff(log_prob_offsets), np.diff(id_offsets)
    if (wrong := np.flatnonzero(lengths != expected)).size:
        row = int(wrong[0])
        raise ValueError(
            f"completions[{row}].log_probs has {lengths[row]} values, but its token_ids has {expected[row]}"
        )


def _spread_over_tokens(advantages: Float32Array, completions: Sequence[Completion]) -> Float32Array:
    """The advantage of each token's turn, ``float32 [sum T]`` over all rows, of ``advantages [N, K]``.

    The turns of a completion's branches come after its own: with turns 0 and 1 in the completion, the first turn of
    its first branch has the column 2.
    """
    token_advantages = [np.zeros(0, np.float32)]
    for values, completion in zip(advantages, completions, strict=True):
        first = 0
        for row in list_rows(completion):
            token_advantages.append(values[first + number_turns(row)])
            first += len(row.turns)
    return np.concatenate(token_advantages)


def _check_token_advantages(advantages: Sequence[Float32Array], completions: Sequence[Completion]) -> Float32Array:
    """The advantage of each token, ``float32 [sum T]``, of an array ``[T_i]`` for each completion."""
    if len(advantages) != len(completions):
        raise ValueError(
            f"advantages has {len(advantages)} arrays, but scored_groups hold {len(completions)} completions"
        )
    for index, (values, completion) in enumerate(zip(advantages, completions, strict=True)):
        if completion.branches:
            raise ValueError(f"advantages[{index}] has a value for each token, but completion {index} has branches")
        if values.shape != (len(completion.token_ids),):
            raise ValueError(
                f"advantages[{index}] has shape {values.shape}, but completion {index} has {len(completion.token_ids)} "
                "tokens"
            )
        if not np.isfinite(values).all():
            raise ValueError(f"advantages[{index}] has a value that is not finite")
    return np.concatenate([np.zeros(0, np.float32), *advantages]).astype(np.float32)


def _check_advantages(advantages: Any, completions: Sequence[Completion]) -> Float32Array:
    array, count = np.asarray(advantages), len(completions)
    if array.ndim not in (1, 2) or array.dtype.kind not in "iuf":
        raise TypeError(
            f"advantages has dtype {array.dtype} and shape {array.shape}: expected float32 in one dimension, or in two "
            "with a column for each turn"
        )
    if len(array) != count:
        raise ValueError(f"advantages has {len(array)} values, but scored_groups hold {count} completions")
    values = array.astype(np.float32)
    needed = np.ones(count, np.bool_)
    if array.ndim == 2:
        turns = np.array([count_turns(completion) for completion in completions], np.int64)
        if turns.max(initial=0) > array.shape[1]:
            row = int(turns.argmax())
            raise ValueError(f"advantages has {array.shape[1]} columns, but completion {row} has {turns[row]} turns")
        needed = np.arange(array.shape[1]) < turns[:, None]
    if (wrong := np.argwhere(needed & ~np.isfinite(values))).size:
        first_wrong = tuple(wrong[0].tolist())
        raise ValueError(f"advantages[{', '.join(map(str, first_wrong))}] is not finite: {values[first_wrong]}")
    return values
