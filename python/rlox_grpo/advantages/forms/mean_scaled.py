"""MaxRL (arXiv:2602.02710): the reward minus the mean of its group, over that mean.

Formula: :func:`rlox_grpo.advantages.mean_scaled.mean_scaled_advantages`.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlox_grpo.advantages.form import AdvantageFn, over_groups
from rlox_grpo.advantages.mean_scaled import mean_scaled_advantages
from rlox_grpo.advantages.moving import MovingBaselines
from rlox_grpo.config.records import AdvantageConfig

CHOSEN_BY = {"reward_scaling": "mean"}


def make(config: AdvantageConfig, weights: Sequence[float], moving: MovingBaselines) -> AdvantageFn:
    """See :class:`rlox_grpo.advantages.forms.Form`."""
    epsilon = config.std_epsilon
    return over_groups(lambda rewards, offsets: mean_scaled_advantages(rewards, offsets, std_epsilon=epsilon))
