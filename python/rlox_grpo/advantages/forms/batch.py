"""REINFORCE++ (arXiv:2501.03262): the whole batch is one group, so that the baseline is the mean of its rewards.

Formula: :func:`rlox_grpo.advantages.group.group_advantages` with one group of N completions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlox_grpo.advantages.form import AdvantageFn, over_groups, read_deviation_options
from rlox_grpo.advantages.group import group_advantages
from rlox_grpo.advantages.moving import MovingBaselines
from rlox_grpo.config.records import AdvantageConfig

CHOSEN_BY = {"baseline": "batch"}


def make(config: AdvantageConfig, weights: Sequence[float], moving: MovingBaselines) -> AdvantageFn:
    """See :class:`rlox_grpo.advantages.forms.Form`. ``reward_scaling="batch"`` divides by the batch's deviation."""
    scaling: Any = "group" if config.reward_scaling == "batch" else "none"
    options = read_deviation_options(config)
    return over_groups(lambda rewards, offsets: group_advantages(rewards, len(rewards), scaling=scaling, **options))
