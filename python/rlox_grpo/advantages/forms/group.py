"""GRPO, RLOO and Dr. GRPO: the reward minus the baseline of its group, over a standard deviation.

Formula and sources: :func:`rlox_grpo.advantages.group.group_advantages`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlox_grpo.advantages.form import AdvantageFn, choose_baseline, over_groups, read_deviation_options
from rlox_grpo.advantages.group import group_advantages
from rlox_grpo.advantages.moving import MovingBaselines
from rlox_grpo.config.records import AdvantageConfig

CHOSEN_BY: Mapping[str, str] = {}


def make(config: AdvantageConfig, weights: Sequence[float], moving: MovingBaselines) -> AdvantageFn:
    """See :class:`rlox_grpo.advantages.forms.Form`."""
    scaling: Any = config.reward_scaling
    options: dict[str, Any] = {"baseline": choose_baseline(config), **read_deviation_options(config)}
    return over_groups(
        lambda rewards, offsets: group_advantages(rewards, group_offsets=offsets, scaling=scaling, **options)
    )
