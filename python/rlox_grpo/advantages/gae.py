"""Advantages of the turns of an episode, from temporal differences: GAGPO (arXiv:2605.13217)."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rlox_grpo.config.defaults import DDOF, STD_EPSILON
from rlox_grpo.groups import discount_returns


def gae_advantages(
    rewards: NDArray[np.float64],
    states: NDArray[np.int64],
    group_offsets: NDArray[np.int64],
    *,
    discount: float,
    trace_decay: float,
    scaling: Literal["group", "none"] = "group",
    ddof: int = DDOF,
    std_epsilon: float = STD_EPSILON,
) -> NDArray[np.float32]:
    """Generalised advantage of each turn, with state values from the group: GAGPO (arXiv:2605.13217).

    ``V(s)`` is the mean of the discounted returns G_k of all turns of the group in the state s, and 0 after the last
    turn. Then δ_k = r_k + discount · V(s_{k+1}) − V(s_k) and A_k = δ_k + discount · trace_decay · A_{k+1} (GAE,
    arXiv:1506.02438, eq. 16). With ``trace_decay=1``, A_k is G_k − V(s_k).

    ``scaling="group"`` subtracts the mean of all turns of the group and divides by their standard deviation. If every
    episode has one turn, the result is that of :func:`group_advantages`.

    Args:
        rewards: ``float64 [N, K]``, of :func:`rlox_grpo.groups.compute_turn_rewards`; rows of NaN are left out of every
            statistic, and their advantages are 0.
        states: ``int64 [N, K]``, of :func:`rlox_grpo.groups.number_states`.
        group_offsets: ``int64 [B + 1]``.
        discount: γ.
        trace_decay: λ.
        scaling, ddof, std_epsilon: as in :func:`group_advantages`.

    Returns:
        ``float32 [N, K]``, NaN after an episode's last turn.
    """
    returns = discount_returns(rewards, discount)
    valid = (states >= 0) & ~np.isnan(returns)
    values = np.zeros_like(returns)
    values[valid] = _mean_by_state(returns[valid], states[valid])
    # δ = (r + discount · V') − V in the order of the returns: exactly 0 where the returns of each state are equal.
    advantages = np.where(valid, rewards, 0.0)
    advantages[:, :-1] += discount * values[:, 1:]
    advantages -= values
    for turn in range(advantages.shape[1] - 2, -1, -1):
        advantages[:, turn] += discount * trace_decay * advantages[:, turn + 1]
    for start, stop in pairwise(group_offsets.tolist() if scaling == "group" else ()):
        in_group = valid[start:stop]
        group_advantages = advantages[start:stop][in_group]
        spread = (
            float(group_advantages.std(ddof=ddof))
            if len(group_advantages) > ddof and group_advantages.max() > group_advantages.min()
            else 0.0
        )
        scaled = (
            (group_advantages - group_advantages.mean()) / (spread + std_epsilon)
            if spread > 0
            else np.zeros_like(group_advantages)
        )
        advantages[start:stop][in_group] = scaled
    advantages[states < 0] = np.nan
    return advantages.astype(np.float32)


def _mean_by_state(returns: NDArray[np.float64], states: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return for each turn the mean return of its state, ``float64 [M]``; equal returns have exactly that mean."""
    _, first, inverse, count = np.unique(states, return_index=True, return_inverse=True, return_counts=True)
    # The mean of the differences: it is exactly 0 for equal returns, so that their advantages are.
    differences = returns - returns[first][inverse]
    return returns[first][inverse] + (np.bincount(inverse, weights=differences) / count)[inverse]
