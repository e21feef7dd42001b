"""Advantages of the turns of an episode, from the rewards of this turn and of later ones."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rlox_grpo.advantages.group import Baseline
from rlox_grpo.config.defaults import DDOF, STD_EPSILON


def turn_advantages(
    returns: NDArray[Any],
    turns: NDArray[np.int64],
    group_offsets: NDArray[np.int64],
    *,
    scaling: Literal["group", "none"] = "group",
    ddof: int = DDOF,
    std_epsilon: float = STD_EPSILON,
    baseline: Baseline = "mean",
) -> NDArray[np.float32]:
    """Advantage of each turn: its return minus the baseline of the same turn over the group.

    An episode that has ended counts as a return of 0 in the later turns' baselines. A baseline therefore does not
    depend on which episodes of the group are still running, which is up to the policy; a mean over the running episodes
    alone would weight turns by the number of these episodes, and its expected gradient would not be that of the reward.
    With ``scaling="none"`` and ``baseline="leave_one_out"`` the gradient is unbiased; with ``baseline="mean"`` it is
    the unbiased one times (G − 1) / G.

    ``scaling="group"`` divides a group by one number, the standard deviation of its returns from their baselines over
    all turns up to the last one of its longest episode. If every episode has one turn, the result is that of
    :func:`group_advantages`.

    Args:
        returns: ``float64 [N, K]``, of :func:`rlox_grpo.groups.compute_turn_returns`; rows of NaN are left out of every
            statistic, and their advantages are 0.
        turns: ``int64 [N]``, the turns of each episode.
        group_offsets: ``int64 [B + 1]``.
        scaling, ddof, std_epsilon, baseline: as in :func:`group_advantages`.

    Returns:
        ``float32 [N, K]``, NaN after an episode's last turn.
    """
    advantages = np.zeros(returns.shape)
    for start, stop in pairwise(group_offsets.tolist()):
        valid = np.arange(start, stop)[~np.isnan(returns[start:stop, 0])]
        # [valid, turns of the longest]. Episodes that have ended have the return 0 there; see the docstring.
        valid_returns = returns[valid, : turns[valid].max(initial=1)]
        count = len(valid)
        if count == 0 or (valid_returns.max(axis=0) == valid_returns.min(axis=0)).all():
            continue
        centred = valid_returns - valid_returns.mean(axis=0)
        # r_i − mean of the others = (r_i − mean of all) · G / (G − 1)
        scale = count / (count - 1) if baseline == "leave_one_out" else 1.0
        if scaling == "group":
            freedom = (count - ddof) * valid_returns.shape[1]  # one mean is estimated for each turn
            deviation = np.sqrt((centred**2).sum() / freedom) + std_epsilon if freedom > 0 else 0.0
            scale = scale / deviation if deviation > 0 else 0.0
        advantages[valid, : valid_returns.shape[1]] = centred * scale
    advantages[np.arange(returns.shape[1]) >= turns[:, None]] = np.nan
    return advantages.astype(np.float32)
