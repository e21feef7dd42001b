"""NumPy twin of every kernel: the executable specification that the Rust code is tested against."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def group_advantages(
    rewards: Array,
    group_size: int | None = None,
    *,
    group_offsets: Array | None = None,
    scaling: str = "group",
    ddof: int = 1,
    std_epsilon: float = 1e-4,
    baseline: str = "mean",
) -> Array:
    """``(r - mean_g) / (sd + std_epsilon)`` over valid (not NaN) rewards, 0 where a group is constant: ``[N]``."""
    if group_offsets is None:
        group_offsets = np.arange(0, len(rewards) + 1, group_size or 1)
    num_groups = len(group_offsets) - 1
    group = np.repeat(np.arange(num_groups), np.diff(group_offsets))  # [N]
    valid = ~np.isnan(rewards)
    values = np.where(valid, rewards, 0).astype(np.float64)

    count = np.bincount(group, weights=valid, minlength=num_groups)  # [B]
    mean = np.bincount(group, weights=values, minlength=num_groups) / np.maximum(count, 1)
    centred = np.where(valid, values - mean[group], 0)
    low, high = np.full(num_groups, np.inf), np.full(num_groups, -np.inf)
    np.minimum.at(low, group[valid], values[valid])
    np.maximum.at(high, group[valid], values[valid])

    if scaling == "group":
        scale = _scale(np.bincount(group, weights=centred**2, minlength=num_groups), count, ddof, std_epsilon)
    elif scaling == "batch":
        total = np.count_nonzero(valid)
        batch_centred = np.where(valid, values - values.sum() / max(total, 1), 0)
        scale = _scale(np.full(num_groups, (batch_centred**2).sum()), np.full(num_groups, total), ddof, std_epsilon)
    else:
        scale = np.ones(num_groups)
    if baseline == "leave_one_out":
        scale = scale * count / np.maximum(count - 1, 1)
    scale = np.where(low < high, scale, 0)
    return (centred * scale[group]).astype(rewards.dtype)


def _scale(squares: Array, count: Array, ddof: int, std_epsilon: float) -> Array:
    """``1 / (sd + std_epsilon)``, 0 where there is no deviation to divide by."""
    divisor = np.sqrt(squares / np.maximum(count - ddof, 1)) + std_epsilon
    defined = (count > ddof) & (divisor > 0)
    return np.where(defined, 1 / np.where(defined, divisor, 1), 0)


def broadcast_advantages(advantages: Array, lengths: Array) -> Array:
    """``[N]`` over the tokens of each row: ``[sum of lengths]``."""
    return np.repeat(advantages, lengths)


def pad(
    values: Array, offsets: Array, side: str = "right", pad_token_id: int = 0, multiple_of: int = 1
) -> tuple[Array, Array, Array]:
    """Ids, mask and positions of ragged rows, each ``[N, L]``."""
    lengths = np.diff(offsets)
    width = -(-int(lengths.max(initial=0)) // multiple_of) * multiple_of
    start = width - lengths if side == "left" else np.zeros_like(lengths)
    positions = np.arange(width) - start[:, None]  # [N, L]
    mask = (positions >= 0) & (positions < lengths[:, None])
    ids = np.full(mask.shape, pad_token_id, dtype=np.int64)
    ids[mask] = values
    return ids, mask, np.where(mask, positions, 0)


def pad_values(values: Array, offsets: Array, rows: Array, width: int, fill: float) -> Array:
    """Pad the chosen rows on the right to ``width``."""
    columns = np.arange(width)
    mask = columns < np.diff(offsets)[rows][:, None]
    at = offsets[:-1][rows][:, None] + columns
    out = np.full(mask.shape, fill, dtype=values.dtype)
    out[mask] = values[at[mask]]
    return out


def layout_rows(
    prompts: Array,
    prompt_offsets: Array,
    completions: Array,
    completion_offsets: Array,
    prompt_of_row: Array,
    train: Array,
    rows: Array,
    pad_token_id: int = 0,
    multiple_of: int = 1,
) -> tuple[Array, ...]:
    """Ids and mask ``[N, L]``; completion ids and mask, loss mask ``[N, T]``; prompt lengths ``[N]``."""
    chosen_prompts = [_row(prompts, prompt_offsets, prompt_of_row[row]) for row in rows]
    chosen = [_row(completions, completion_offsets, row) for row in rows]
    joined = [np.concatenate(pair) for pair in zip(chosen_prompts, chosen, strict=True)]
    input_ids, attention_mask, _ = pad(*_flat(joined), "right", pad_token_id, multiple_of)
    completion_ids, completion_mask, _ = pad(*_flat(chosen), "right", pad_token_id)
    loss_mask = completion_mask & train[rows][:, None]
    prompt_lengths = np.array([len(prompt) for prompt in chosen_prompts], np.int64)
    return input_ids, attention_mask, completion_ids, completion_mask, loss_mask, prompt_lengths


def _row(values: Array, offsets: Array, index: int) -> Array:
    return values[offsets[index] : offsets[index + 1]]


def _flat(rows: Sequence[Array]) -> tuple[Array, Array]:
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    return np.concatenate([np.empty(0, np.int64), *rows]), np.concatenate([[0], np.cumsum(lengths)])


def share_prefixes(values: Array, offsets: Array) -> tuple[Array, Array, Array, Array]:
    """``prompt_of_row``, ``first_row``, ``rows`` grouped by prompt, ``offsets``."""
    seen: dict[bytes, int] = {}
    keys = [_row(values, offsets, index).tobytes() for index in range(len(offsets) - 1)]
    prompt_of_row = np.array([seen.setdefault(key, len(seen)) for key in keys], dtype=np.int64)
    first_row = np.unique(prompt_of_row, return_index=True)[1]
    counts = np.bincount(prompt_of_row, minlength=len(seen))
    return prompt_of_row, first_row, np.argsort(prompt_of_row, kind="stable"), np.concatenate([[0], np.cumsum(counts)])


def pack(lengths: Array, token_budget: int, padded: bool, num_ranks: int, linear_cost: int) -> list[list[int]]:
    """Micro-batches as ascending row indices, in descending cost; a row over the budget is alone."""
    cost = [int(length) * linear_cost + int(length) ** 2 + 1 for length in lengths]
    longest_first = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    if not longest_first:
        return []

    def bin_cost(rows: list[int]) -> int:
        costs = [cost[row] for row in rows]
        return max(costs, default=0) * len(rows) if padded else sum(costs)

    if padded:
        bins = _cut(longest_first, lengths, cost, token_budget, num_ranks)
    else:
        bins = _spread(longest_first, lengths, cost, token_budget, num_ranks)
    bins.sort(key=lambda rows: (-bin_cost(rows), min(rows, default=-1)))
    return [sorted(rows) for rows in bins]


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _spread(order: list[int], lengths: Array, cost: list[int], budget: int, num_ranks: int) -> list[list[int]]:
    """Longest first into the cheapest bin with room; more bins until that succeeds."""
    rooms: list[int] = []
    for row in order:  # best fit decreasing: how many bins to begin with
        fitting = [(room, index) for index, room in enumerate(rooms) if room >= lengths[row]]
        if fitting:
            rooms[min(fitting)[1]] -= int(lengths[row])
        else:
            rooms.append(budget - int(lengths[row]))
    count = _round_up(len(rooms), num_ranks)
    while True:
        bins: list[list[int]] = [[] for _ in range(count)]
        heap = [(0, 0, index) for index in range(count)]
        for row in order:
            full = []
            while heap and heap[0][1] + lengths[row] > budget and bins[heap[0][2]]:
                full.append(heapq.heappop(heap))
            if not heap:
                break
            spent, tokens, index = heapq.heappop(heap)
            bins[index].append(row)
            for entry in [*full, (spent + cost[row], tokens + int(lengths[row]), index)]:
                heapq.heappush(heap, entry)
        else:
            return bins
        count = _round_up(count + 1 + count // 64, num_ranks)


def _cut(order: list[int], lengths: Array, cost: list[int], budget: int, num_ranks: int) -> list[list[int]]:
    """Cut the rows, longest first, into runs whose costliest is as cheap as their number allows."""

    def runs_within(limit: int | None) -> list[list[int]]:
        runs: list[list[int]] = []
        for row in order:
            if runs:
                first, rows = runs[-1][0], len(runs[-1]) + 1
                if rows * lengths[first] <= budget and (limit is None or rows * cost[first] <= limit):
                    runs[-1].append(row)
                    continue
            runs.append([row])
        return runs

    count = _round_up(len(runs_within(None)), num_ranks)
    low, high = 0, cost[order[0]] * len(order)
    while low < high:
        middle = (low + high) // 2
        if len(runs_within(middle)) <= count:
            high = middle
        else:
            low = middle + 1
    runs = runs_within(high)
    while len(runs) < count:
        # The costliest run of more than one row is halved, of equal ones that which begins with the smallest row.
        costliest = max(runs, key=lambda run: (cost[run[0]] * len(run) if len(run) > 1 else 0, [-row for row in run]))
        runs.remove(costliest)
        half = -(-len(costliest) // 2)
        runs += [costliest[:half], costliest[half:]]
    return runs
