"""Rows of completions as padded batches and as micro-batches within a token budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

import rlox_grpo._native as _native
from rlox_grpo.batch.ragged import as_ragged, check_at_least, to_integers
from rlox_grpo.batch.rows import Rows
from rlox_grpo.types import (
    Batch,
    BoolArray,
    Completion,
    EnvironmentTokens,
    Int32Array,
    Int64Array,
    Prompt,
    RolloutGroup,
    SamplingMask,
    ScoredGroup,
)

if TYPE_CHECKING:
    import torch

    from rlox_grpo.distributed.ranks import Ranks

# Cost of a token without attention, in units of a (query, key) pair: 6 * hidden_size, for a hidden size of 4,096.
LINEAR_COST = 24_576


class Padded(NamedTuple):
    """Rows as a rectangle: ``token_ids`` int64, ``attention_mask`` bool, ``position_ids`` int64, each ``[N, L]``.

    Positions count from 0 at each row's first real token and are 0 on padding.
    """

    token_ids: Int64Array
    attention_mask: BoolArray
    position_ids: Int64Array


class Packing(NamedTuple):
    """Micro-batches: number m holds ``rows[offsets[m]:offsets[m + 1]]`` and belongs to rank ``m % num_ranks``."""

    rows: Int64Array
    offsets: Int64Array
    num_ranks: int

    def rows_by_rank(self, rank: int) -> list[Int64Array]:
        """Return the row indices of each of the rank's micro-batches, in their order."""
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank is {rank}: it is below num_ranks, {self.num_ranks}")
        return np.split(self.rows, self.offsets[1:-1])[rank :: self.num_ranks] if len(self.offsets) > 1 else []


class SharedPrefixes(NamedTuple):
    """Unique prompts in first-seen order, and the rows that belong to each.

    Attributes:
        prompt_indices: ``int64 [N]``, the unique prompt of each row.
        first_row: ``int64 [P]``, the first row of each unique prompt.
        rows: ``int64 [N]``, grouped by prompt: prompt p has ``rows[offsets[p]:offsets[p + 1]]``.
        offsets: ``int64 [P + 1]``.
    """

    prompt_indices: Int64Array
    first_row: Int64Array
    rows: Int64Array
    offsets: Int64Array


def pad(
    rows: Any,
    offsets: Any = None,
    *,
    side: Literal["left", "right"] = "right",
    pad_token_id: int = 0,
    multiple_of: int = 1,
) -> Padded:
    """Pad rows of token ids to the longest; masks and positions come from lengths, never from ids.

    Args:
        rows: Lists of ints, 1-D integer arrays, one 2-D array, or a flat array with ``offsets``.
        offsets: ``int64 [N + 1]``: row i is ``rows[offsets[i]:offsets[i + 1]]``.
        side: Where the padding goes: ``"left"`` for generation, ``"right"`` for training.
        pad_token_id: Token id of padding.
        multiple_of: Round the width up to a multiple of this number.

    Another thread may write to ``rows`` and ``offsets`` during the call: the offsets are copied first, and a change to
    the token ids can change the result but cannot cause an error.

    Raises:
        TypeError: A row is not integers of one dimension; the message names the row.
        ValueError: Offsets that do not fit, an unknown side, a multiple below 1.
        MemoryError: The padded rows do not fit in memory; the message names ``rows`` or ``multiple_of``.
    """
    multiple_of = check_at_least(multiple_of, 1, "multiple_of")
    if offsets is None and type(rows) is list and rows and type(rows[0]) is np.ndarray:
        padded = _native.pad_arrays(rows, side, pad_token_id, multiple_of)  # without a flat copy between
        if padded is not None:
            return Padded(*padded)
    return Padded(*_native.pad(*as_ragged(rows, offsets, "rows"), side, pad_token_id, multiple_of))


def pack(
    lengths: Any,
    *,
    token_budget: int,
    padded: bool = True,
    num_ranks: int = 1,
    linear_cost: int = LINEAR_COST,
    oversize: Literal["error", "alone"] = "error",
) -> Packing:
    """Put rows into micro-batches within a token budget, of balanced cost ``linear_cost * L + L**2``.

    The number of micro-batches is a multiple of ``num_ranks``. The micro-batches that ranks process at the same time
    have about the same cost. A micro-batch is empty only if there are fewer rows than micro-batches. The same arguments
    give the same packing.

    Args:
        lengths: ``int64 [N]``, tokens of each row.
        token_budget: Maximum number of tokens in a micro-batch.
        padded: Count a micro-batch as rows times its longest row; otherwise as the sum of its lengths.
        num_ranks: Processes that share the rows.
        linear_cost: Cost of a token apart from attention; about ``6 * hidden_size``.
        oversize: A row over the budget is an ``"error"``, or goes ``"alone"``.

    Raises:
        TypeError: Lengths that are not integers of one dimension.
        ValueError: A row over the budget (naming it and its length), a negative length, a budget or ranks below 1.
    """
    lengths = to_integers(lengths, "lengths", 1)
    num_ranks, linear_cost = check_at_least(num_ranks, 1, "num_ranks"), check_at_least(linear_cost, 0, "linear_cost")
    rows, offsets = _native.pack(lengths, token_budget, padded, num_ranks, linear_cost, oversize)
    return Packing(rows, offsets, num_ranks)


def share_prefixes(rows: Any, offsets: Any = None) -> SharedPrefixes:
    """Find the rows that have exactly the same tokens, in time linear in the number of tokens.

    The rows and the errors are those of `pad`. Another thread may write to the arguments during the call: the
    offsets are copied first, and a change to the token ids can change the groups but cannot cause an error.
    """
    return SharedPrefixes(*_native.share_prefixes(*as_ragged(rows, offsets, "rows")))


def build_batch(
    scored_groups: Sequence[ScoredGroup],
    advantages: Any,
    *,
    train_truncated: bool = True,
    pad_token_id: int = 0,
    multiple_of: int = 1,
    num_loss_tokens: float | None = None,
    num_sequences: float | None = None,
    with_environment: bool = False,
    device: torch.device | str | None = None,
) -> Batch:
    """Lay out every completion of the groups as one batch.

    Args:
        scored_groups: Prompts and their completions.
        advantages: ``[N]``, one for each completion, prompt-major over the groups; or ``[N, K]``, one for each turn of
            a completion, NaN after its last turn, where K is the largest number of turns.
        train_truncated: Whether completions cut off at the length limit are trained on (DAPO's overlong filtering,
            arXiv:2503.14476, is False).
        pad_token_id: Token id of padding; masks come from lengths.
        multiple_of: Round the width L up to a multiple of this number.
        num_loss_tokens: Denominator of the whole optimizer step over all ranks; this batch's own count when None.
        num_sequences: Likewise, the number of sequences that hold a loss token.
        with_environment: Whether to mark the tokens that ``environment_loss_coef`` trains on.
        device: Where the tensors go; CPU when None.

    Raises:
        TypeError: An array of the wrong type; the message names it and its index.
        ValueError: Advantages that are not finite or not one for each completion or turn, an empty prompt, log-probs
            that do not match their tokens, turns that do not fit their completion.
    """
    step = Rows.collect(scored_groups, advantages, train_truncated, with_environment)
    totals = step.count_totals(num_loss_tokens, num_sequences)
    return step.batch(np.arange(step.count), totals, pad_token_id, multiple_of, device=device)


def microbatches(
    scored_groups: Sequence[ScoredGroup],
    advantages: Any,
    *,
    token_budget: int,
    padded: bool = True,
    share_prompts: bool = False,
    num_ranks: int = 1,
    rank: int = 0,
    oversize: Literal["error", "alone"] = "error",
    train_truncated: bool = True,
    with_environment: bool = False,
    device: torch.device | str | None = None,
) -> list[Batch]:
    """Lay out the completions of the groups as micro-batches within a token budget.

    Every micro-batch has the denominators of the whole step, so that their losses add up to the loss of the step.
    ``row_index`` is the index of each row's completion in the step. With ``num_ranks`` above 1, every rank passes the
    same groups and gets its share. All ranks get the same number of micro-batches; a micro-batch can be empty if there
    are fewer rows than ranks. Arguments and errors are those of `build_batch` and `pack`.

    With ``share_prompts``, a prompt counts once for its completions, and padding does not count. A group stays together
    if it fits the budget; a larger group is split into parts with one copy of the prompt each.
    """
    step = Rows.collect(scored_groups, advantages, train_truncated, with_environment)
    totals = step.count_totals()
    row_groups = step.split_groups(token_budget) if share_prompts else [[row] for row in range(step.count)]
    packing = pack(
        [step.count_tokens(row_group) for row_group in row_groups],
        token_budget=token_budget,
        padded=padded and not share_prompts,
        num_ranks=num_ranks,
        oversize=oversize,
    )
    rows = [
        [row for index in group_indices for row in row_groups[index]] for group_indices in packing.rows_by_rank(rank)
    ]
    return [step.batch(np.sort(np.array(batch_rows, np.int64)), totals, device=device) for batch_rows in rows]


def drop_tokens(
    batches: Sequence[Batch], dropped: Mapping[tuple[int, int], Sequence[int]], ranks: Ranks | None = None
) -> list[Batch]:
    """Exclude tokens from the loss and environment masks and from the denominators of micro-batches.

    Args:
        batches: all micro-batches of an optimizer step, or this rank's.
        dropped: the offsets of the excluded tokens of each row, by ``row_index`` and ``branch_index``, if any; see
            :func:`rlox_grpo.groups.find_end_tokens` and :func:`rlox_grpo.groups.find_stale_tokens`.
        ranks: the ranks that have the step's other micro-batches.
    """
    numbers = [batch.row_index.cpu().tolist() for batch in batches]
    cleared = []
    for batch, rows in zip(batches, numbers, strict=True):
        branches = [0] * len(rows) if batch.branches is None else batch.branches.index.cpu().tolist()
        keys = zip(rows, branches, strict=True)
        cleared.append([(line, token) for line, key in enumerate(keys) for token in dropped.get(key, ())])
    masks = [_clear(batch.loss_mask, entries) for batch, entries in zip(batches, cleared, strict=True)]
    lengths = _count_by_completion(masks, numbers, ranks)
    counted = {
        "num_loss_tokens": float(sum(lengths.values())),
        "num_sequences": float(sum(count > 0 for count in lengths.values())),
    }
    without_dropped = []
    for batch, mask, rows in zip(batches, masks, numbers, strict=True):
        branched = batch.branches
        if branched is not None:
            row_lengths = branched.sequence_lengths.new_tensor([lengths[str(row)] for row in rows])
            branched = replace(branched, sequence_lengths=row_lengths)
        totals = replace(batch.totals, **counted)
        without_dropped.append(replace(batch, loss_mask=mask, totals=totals, branches=branched))
    observed = [
        _clear(batch.environment.mask, entries)
        for batch, entries in zip(batches, cleared, strict=True)
        if batch.environment is not None
    ]
    if not observed:
        return without_dropped
    lengths = _count_by_completion(observed, numbers, ranks)
    return [
        replace(
            batch,
            environment=EnvironmentTokens(mask, batch.row_index.new_tensor([lengths[str(row)] for row in rows])),
        )
        for batch, mask, rows in zip(without_dropped, observed, numbers, strict=True)
    ]


def _clear(mask: torch.Tensor, entries: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Return ``mask`` with False at ``entries``."""
    mask = mask.clone()
    if entries:
        mask[tuple(zip(*entries, strict=True))] = False
    return mask


def _count_by_completion(
    masks: Sequence[torch.Tensor], numbers: Sequence[Sequence[int]], ranks: Ranks | None
) -> dict[str, int]:
    """Count the True values of each completion over all micro-batches and ranks; keys are text, as ranks send JSON."""
    mine: Counter[str] = Counter()
    for rows, mask in zip(numbers, masks, strict=True):
        for row, count in zip(rows, mask.sum(dim=-1).cpu().tolist(), strict=True):
            mine[str(row)] += count
    counts: Counter[str] = Counter()
    for rank_counts in [mine] if ranks is None else ranks.gather(mine):
        counts.update(rank_counts)
    return counts


def group_tokens(
    prompt_ids: Int64Array,
    completions: Sequence[Int64Array],
    masks: Sequence[BoolArray] | None = None,
    sampling_masks: Sequence[SamplingMask[Int32Array] | None] | None = None,
) -> ScoredGroup:
    """Make a group of a prompt and its completions without rewards and log-probs, for a forward pass over them.

    ``masks`` has the ``loss_mask`` of each completion, None: all tokens; ``sampling_masks`` the sampling mask of each.
    """
    return group_prompt(Prompt(prompt_ids, 0), completions, masks, sampling_masks)


def group_prompt(
    prompt: Prompt,
    completions: Sequence[Int64Array],
    masks: Sequence[BoolArray] | None = None,
    sampling_masks: Sequence[SamplingMask[Int32Array] | None] | None = None,
) -> ScoredGroup:
    """Like :func:`group_tokens`, with a prompt that may have pictures."""
    sampled: Sequence[BoolArray | None] = [None] * len(completions) if masks is None else masks
    rows = tuple(
        Completion(ids, np.zeros(len(ids), np.float32), "stop", sampled=mask, sampling_mask=drawn_from)
        for ids, mask, drawn_from in zip(completions, sampled, sampling_masks or [None] * len(completions), strict=True)
    )
    return ScoredGroup(RolloutGroup(prompt, rows), np.zeros(len(rows), np.float32), {})


def fill_if_empty(batch: Batch, scored: ScoredGroup) -> Batch:
    """Return ``batch``, or if it has no row, a dummy batch of the completions of ``scored`` with an empty loss mask.

    An idle rank thus joins every collective.
    """
    import torch

    if len(batch.row_index):
        return batch
    dummy = build_batch(
        [scored],
        np.zeros(len(scored.rewards), np.float32),
        device=batch.input_ids.device,
    )
    nothing = torch.zeros_like(dummy.loss_mask)
    return replace(
        dummy,
        loss_mask=nothing,
        totals=batch.totals,
        environment=None if batch.environment is None else EnvironmentTokens(nothing),
        log_probs=replace(dummy.log_probs, origins=None),
    )
