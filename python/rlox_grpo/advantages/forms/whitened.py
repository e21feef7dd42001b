"""Whitening: the reward minus the baseline of its group, over the standard deviation of these differences.

``A_i = (r_i − b_g) / (sd + std_epsilon)``, sd over the differences of all completions with a reward. Source:
REINFORCE++-Baseline, arXiv:2501.03262.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlox_grpo.advantages.form import AdvantageFn, choose_baseline, over_groups
from rlox_grpo.advantages.group import group_advantages
from rlox_grpo.advantages.moving import MovingBaselines
from rlox_grpo.config.records import AdvantageConfig

CHOSEN_BY = {"reward_scaling": "whiten"}


def make(config: AdvantageConfig, weights: Sequence[float], moving: MovingBaselines) -> AdvantageFn:
    """See :class:`rlox_grpo.advantages.forms.Form`."""
    baseline = choose_baseline(config)

    def whiten(rewards: NDArray[Any], offsets: NDArray[np.int64]) -> NDArray[np.float32]:
        centred = group_advantages(rewards, group_offsets=offsets, scaling="none", baseline=baseline)
        valid = centred[~np.isnan(rewards)].astype(np.float64)
        if len(valid) <= config.ddof:  # no standard deviation; epsilon alone would be no scale
            return np.zeros(len(centred), np.float32)
        spread = float(valid.std(ddof=config.ddof))
        scaled: NDArray[np.float32] = (centred / max(spread + config.std_epsilon, 1e-30)).astype(np.float32)
        return scaled

    return over_groups(whiten)
