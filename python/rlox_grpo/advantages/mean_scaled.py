"""Advantages divided by the mean reward of the group: MaxRL (arXiv:2602.02710)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlox_grpo.config.defaults import STD_EPSILON


def mean_scaled_advantages(
    rewards: NDArray[Any], group_offsets: NDArray[np.int64], *, std_epsilon: float = STD_EPSILON
) -> NDArray[np.float32]:
    """Subtract each group's mean reward and divide by it: MaxRL (arXiv:2602.02710, Algorithm 1).

    ``A_i = (r_i - mean_g) / (mean_g + std_epsilon)``. For rewards of 0 and 1 the policy gradient is then the mean score
    of the correct completions minus that of all: an estimate of the gradient of the log of the pass rate, truncated at
    the order of the group's size. A correct completion of a hard prompt weighs more than under GRPO: with 1 of 4
    correct ``A = 3``, where GRPO has 1.5.

    Args:
        rewards: ``[N]``, prompt-major, each at least 0; NaN is left out of the mean, and its advantage is 0.
        group_offsets: ``int64 [B + 1]``.
        std_epsilon: Added to the mean.

    Returns:
        ``float32 [N]``; 0 in a group without any reward.

    Raises:
        ValueError: A negative reward; the message names its row.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if negative := np.flatnonzero(values < 0).tolist():
        raise ValueError(
            f"reward_scaling='mean' needs rewards of at least 0, and row {negative[0]} has {values[negative[0]]:g}: "
            "MaxRL's weights are those of pass rates; use another reward_scaling, or add a constant to the reward"
        )
    advantages = np.zeros(len(values))
    for start, stop in pairwise(group_offsets.tolist()):
        group = values[start:stop]
        valid = ~np.isnan(group)
        mean = float(group[valid].mean()) if valid.any() else 0.0
        if mean > 0:
            advantages[start:stop][valid] = (group[valid] - mean) / (mean + std_epsilon)
    return advantages.astype(np.float32)
