"""Scored groups of completions: row offsets, returns of turns, zero variance, and the sample behind a row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rlox_grpo.turns import count_turns
from rlox_grpo.types import Float32Array, Int64Array, ScoredGroup

RIGHT = 1.0
"""A completion is right when the first reward function gives it at least this."""


def compute_group_offsets(groups: Sequence[ScoredGroup]) -> Int64Array:
    """``int64 [B + 1]``: the rows of group g are offsets[g] to offsets[g + 1]."""
    return np.cumsum([0, *(len(group.group.completions) for group in groups)], dtype=np.int64)


def compute_turn_returns(
    groups: Sequence[ScoredGroup], rewards: Float32Array | None = None
) -> tuple[NDArray[np.float64], Int64Array]:
    """Return of each turn: what an episode is paid at this turn and after it.

    Turn 0 has the whole reward. What the reward has beyond ``turn_rewards`` is paid at the last turn.

    Args:
        groups: N completions in all, prompt-major.
        rewards: ``[N]``, where they are not the groups' own, such as rewards minus a KL penalty.

    Returns:
        ``float64 [N, K]``, K the most turns of any of them, 0 after an episode's last turn; a row of NaN where the
        reward is NaN. And ``int64 [N]``, the turns of each.

    Raises:
        ValueError: a group whose ``turn_rewards`` are not one finite number for each turn; an episode with branches.
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

    The signal-to-noise filter of RAGEN-2 (arXiv:2604.06268) as VAGEN has it: groups in descending order of variance,
    until their sum reaches the share. Variances have ddof 0; a NaN reward is left out. Of equal variances the first
    group is taken first. Groups without variance are returned only if no group has any.

    Returns:
        Places in ``groups``, ascending.
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

    By ``max == min``, never by a standard deviation or a mean: float32 leaves a residue in the variance of a
    constant 0.3, and a mean says nothing of spread.
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
