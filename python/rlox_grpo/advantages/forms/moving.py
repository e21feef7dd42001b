"""RAE (arXiv:2506.24119): the reward minus a moving average of the run's rewards.

Formula: :class:`rlox_grpo.advantages.moving.MovingBaselines`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from rlox_grpo.advantages.form import AdvantageFn, concatenate_rewards, split_by_group
from rlox_grpo.advantages.moving import MovingBaselines
from rlox_grpo.config.records import AdvantageConfig
from rlox_grpo.types import ScoredGroup

CHOSEN_BY = {"baseline": "moving"}


def make(config: AdvantageConfig, weights: Sequence[float], moving: MovingBaselines) -> AdvantageFn:
    """See :class:`rlox_grpo.advantages.forms.Form`."""

    def advantages(groups: Sequence[ScoredGroup]) -> list[NDArray[Any]]:
        prompts = [group.group.prompt for group in groups for _ in group.group.completions]
        return split_by_group(moving.advantages(concatenate_rewards(groups), prompts), groups)

    return advantages
