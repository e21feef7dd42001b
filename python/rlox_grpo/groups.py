"""Scored groups of completions: turns, row offsets, returns of turns, zero variance, and the sample behind a row.

Example: a completion of two turns, where ``o`` is an observation::

    token_ids   5 6 7 o o 8 9
    sampled     1 1 1 0 0 1 1
    turns       (0, 5)
    turn        0 0 0 0 0 1 1     an observation belongs to the turn before it
    turn ends   0 0 1 0 0 0 1     the last sampled token of each turn

Completions without ``sampled`` and ``turns`` have one turn, and all their tokens are sampled.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from rlox_grpo.types import BoolArray, Completion, Float32Array, Int64Array, ScoredGroup

RIGHT = 1.0
"""Minimum score of the first reward function for a correct completion."""


def list_rows(completion: Completion) -> tuple[Completion, ...]:
    """Return the rows of a completion in the update: the completion and its branches."""
    return (completion, *completion.branches)


def count_sampled(completion: Completion) -> int:
    """Count the sampled tokens of a completion with its branches: its length in metrics, rewards and denominators."""
    return sum(
        len(row.token_ids) if row.sampled is None else int(np.count_nonzero(row.sampled))
        for row in list_rows(completion)
    )


def select_sampled(completion: Completion) -> Int64Array:
    """Return the sampled token ids, ``int64``, in the order of turns, and then those of branches."""
    parts = [row.token_ids if row.sampled is None else row.token_ids[row.sampled] for row in list_rows(completion)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def count_turns(completion: Completion) -> int:
    """Count the turns of a completion with its branches, at least 1."""
    return max(1, sum(len(row.turns) for row in list_rows(completion)))


def mark_sampled(completions: Sequence[Completion]) -> BoolArray | None:
    """Return ``bool [sum T]``, True on sampled tokens, one completion after another; None where all tokens are.

    Raises:
        TypeError: a ``sampled`` that is not bool in one dimension.
        ValueError: a ``sampled`` or ``turns`` that does not fit its completion; see :func:`check_turns`.
    """
    check_turns(completions)
    if all(completion.sampled is None for completion in completions):
        return None
    flags = [np.ones(len(c.token_ids), np.bool_) if c.sampled is None else c.sampled for c in completions]
    return np.concatenate(flags)


def number_turns(completion: Completion) -> Int64Array:
    """Return the turn of each token, ``int64 [T]``, from 0."""
    steps = np.arange(len(completion.token_ids))
    return np.maximum(np.searchsorted(np.asarray(completion.turns, np.int64), steps, side="right") - 1, 0)


def find_end_tokens(completion: Completion, end_ids: Collection[int] = ()) -> list[int]:
    """Return the offsets of the tokens that ended the completion's turns.

    The last turn ended by its last sampled token if ``finish_reason`` is ``"stop"``. An earlier turn has no finish
    reason of its own: it ended by its last sampled token if that is one of ``end_ids``.
    """
    length = len(completion.token_ids)
    flags = np.ones(length, np.bool_) if completion.sampled is None else completion.sampled
    bounds = zip(completion.turns or (0,), (*completion.turns[1:], length), strict=True)
    spans = [np.flatnonzero(flags[start:stop]) + start for start, stop in bounds]
    last_sampled = [int(span[-1]) for span in spans if len(span)]
    ends = [place for place in last_sampled[:-1] if int(completion.token_ids[place]) in end_ids]
    return ends + last_sampled[-1:] if completion.finish_reason == "stop" else ends


def find_stale_tokens(completion: Completion, oldest: int) -> list[int]:
    """Return the offsets of the turns that a version before ``oldest`` sampled, their observations included."""
    if not completion.versions:
        return []
    versions = np.asarray(completion.versions)[number_turns(completion)]
    return [int(place) for place in np.flatnonzero(versions < oldest)]


def check_turns(completions: Sequence[Completion]) -> None:
    """Check ``sampled`` and ``turns`` of each completion against its tokens.

    Raises:
        TypeError: a ``sampled`` that is not a bool array of one dimension.
        ValueError: lengths that differ; turns that do not ascend, or that begin at a token that was not sampled; a
            sampled token before the first turn; a log-prob other than 0 at a token that was not sampled.
    """
    for index, completion in enumerate(completions):
        if completion.sampled is not None or completion.turns:
            _check_turns(completion, f"completions[{index}]")


def _check_turns(completion: Completion, name: str) -> None:
    length, turns, sampled = len(completion.token_ids), completion.turns, completion.sampled
    if sampled is None:
        sampled = np.ones(length, np.bool_)
    if not isinstance(sampled, np.ndarray) or sampled.dtype != np.bool_ or sampled.ndim != 1:
        raise TypeError(f"{name}.sampled is {sampled!r:.80}: expected a bool array in one dimension")
    if len(sampled) != length:
        raise ValueError(f"{name}.sampled has {len(sampled)} values, but its token_ids has {length}")
    for place, start in enumerate(turns):
        if not 0 <= start < length or (place and start <= turns[place - 1]):
            raise ValueError(f"{name}.turns is {turns}: expected ascending offsets below {length}")
        if not sampled[start]:
            raise ValueError(f"{name}.turns[{place}] is {start}, a token that was not sampled: a turn begins with one")
    if turns and sampled[: turns[0]].any():
        raise ValueError(f"{name}.sampled marks a token before turns[0], {turns[0]}: it belongs to no turn")
    if len(completion.log_probs) == length and completion.log_probs[~sampled].any():
        place = int(np.flatnonzero(~sampled & (np.asarray(completion.log_probs) != 0))[0])
        raise ValueError(
            f"{name}.log_probs[{place}] is {completion.log_probs[place]:g}, but the token was not sampled: expected 0"
        )


def compute_group_offsets(groups: Sequence[ScoredGroup]) -> Int64Array:
    """``int64 [B + 1]``: the rows of group g are offsets[g] to offsets[g + 1]."""
    return np.cumsum([0, *(len(group.group.completions) for group in groups)], dtype=np.int64)


def compute_turn_returns(
    groups: Sequence[ScoredGroup], rewards: Float32Array | None = None
) -> tuple[NDArray[np.float64], Int64Array]:
    """Compute the return of each turn: the sum of the rewards at this turn and later ones.

    The return of turn 0 is the whole reward. The part of the reward that is not in ``turn_rewards`` is paid at the last
    turn. Example: a reward of 1 with ``turn_rewards`` ``0.2 0.3`` has the returns ``1 0.8``.

    Args:
        groups: groups with N completions in all.
        rewards: ``[N]``, prompt-major, in place of those of the groups, such as rewards minus a KL penalty.

    Returns:
        The returns, ``float64 [N, K]`` for at most K turns, 0 after the last turn of an episode and NaN if the reward
        is NaN; and the number of turns of each, ``int64 [N]``.

    Raises:
        ValueError: ``turn_rewards`` that are not one finite number for each turn, or an episode with branches.
    """
    completions = [completion for scored in groups for completion in scored.group.completions]
    for row, completion in enumerate(completions):
        if completion.branches:
            raise ValueError(
                f"completions[{row}] has {len(completion.branches)} branches: turn_credit='turn' needs episodes whose "
                "history is never rewritten; set turn_credit='episode'"
            )
    turns = np.array([count_turns(completion) for completion in completions], np.int64)
    whole = np.concatenate([np.zeros(0, np.float32), *(scored.rewards for scored in groups)])
    returns = np.zeros((len(turns), int(turns.max(initial=1))))
    returns[:] = (whole if rewards is None else rewards)[:, None]
    paid: list[Float32Array | None] = []
    for scored in groups:
        paid += [None] * len(scored.group.completions) if scored.turn_rewards is None else scored.turn_rewards
    for row, (own, count) in enumerate(zip(paid, turns, strict=True)):
        if own is not None:
            if np.shape(own) != (count,) or not np.isfinite(own).all():
                raise ValueError(f"turn_rewards[{row}] is {own}: expected a finite number for each of {count} turns")
            returns[row, 1:count] -= np.cumsum(own[:-1], dtype=np.float64)
        if not np.isnan(returns[row, 0]):
            returns[row, count:] = 0.0
    return returns, turns


def select_by_variance(groups: Sequence[ScoredGroup], share: float) -> list[int]:
    """Return the groups with the highest reward variances, as few as have ``share`` of the sum of all variances.

    The signal-to-noise filter of RAGEN-2 (arXiv:2604.06268), as in VAGEN: take groups in descending order of variance
    until the sum reaches the share. Variances have ddof 0 and ignore NaN rewards. Of equal variances, the first group
    is taken first. If no group has variance, all are returned.

    Returns:
        Indices of ``groups``, ascending.
    """
    valid = [scored.rewards[~np.isnan(scored.rewards)].astype(np.float64) for scored in groups]
    variances = np.array([rewards.var() if len(rewards) else 0.0 for rewards in valid])
    if not variances.sum() > 0:
        return list(range(len(groups)))
    order = np.argsort(-variances, kind="stable")
    before = np.cumsum(variances[order]) - variances[order]
    return sorted(order[before < share * variances.sum()].tolist())


def has_zero_variance(scored: ScoredGroup, *, by_turn: bool = False) -> bool:
    """Whether every advantage of a group is 0: its valid rewards are equal or, ``by_turn``, the returns of each turn.

    Equal by ``max == min``; see :func:`has_zero_std`.
    """
    if not by_turn:
        return has_zero_std(scored.rewards)
    returns = compute_turn_returns([scored])[0]
    valid = returns[~np.isnan(returns[:, 0])]
    return len(valid) == 0 or bool((valid.max(axis=0) == valid.min(axis=0)).all())


def has_zero_std(rewards: Float32Array) -> bool:
    """Whether a group has zero variance: its valid rewards are equal, or it has none.

    The test is ``max == min``. A standard deviation is no exact test: in float32 that of a constant 0.3 is not 0.
    """
    valid = rewards[~np.isnan(rewards)]
    return len(valid) == 0 or bool(valid.max() == valid.min())


def describe_sample(scored: Sequence[ScoredGroup], rows: Sequence[int]) -> str:
    """Describe which prompt and completion the first of ``rows`` is."""
    if not rows:
        return ""
    offsets = compute_group_offsets(scored)
    group = int(np.searchsorted(offsets, rows[0], side="right")) - 1
    place = rows[0] - int(offsets[group])
    prompt, completion = scored[group].group.prompt, scored[group].group.completions[place]
    shown = repr(completion.text[:80]) if completion.text is not None else str(completion.token_ids[:16].tolist())
    return f"; row {rows[0]} is completion {place} of prompts[{prompt.index}]: {shown}"
