"""Choose a built-in advantage function by the options: ``baseline``, ``reward_scaling``, ``turn_credit`` and so on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rlox_grpo.advantages.form import AdvantageFn, GroupAdvantages
from rlox_grpo.advantages.forms import find_form
from rlox_grpo.advantages.moving import MovingBaselines
from rlox_grpo.config.records import AdvantageConfig
from rlox_grpo.groups import has_equal_state_returns, has_zero_std, has_zero_variance
from rlox_grpo.types import ScoredGroup


def make_built_in(config: AdvantageConfig, weights: Sequence[float], moving: MovingBaselines) -> AdvantageFn:
    """Return the built-in advantage function that the options choose.

    Args:
        config: the options.
        weights: one for each reward component.
        moving: the averages of ``baseline="moving"``.
    """
    advantages = find_form(config).make(config, weights, moving)
    return _without_losers(advantages) if config.negative_advantages == "zero" else advantages


def make_zero_variance_test(config: AdvantageConfig, weights: Sequence[float]) -> Callable[[ScoredGroup], bool]:
    """Return the function that tells whether all advantages of a group are 0, by its turns or its components.

    ``weights`` has one for each reward component.
    """
    if config.turn_credit == "gae":
        return lambda scored: has_equal_state_returns(scored, config.turn_discount, config.turn_state)
    if config.reward_aggregation == "normalize_then_sum":
        # Equal totals can have different components, each of which is normalised by itself.
        return lambda scored: all(
            has_zero_std(values)
            for values, weight in zip(scored.components.values(), weights, strict=True)
            if weight != 0
        )
    if config.baseline in ("batch", "moving"):
        # The baseline is no mean of the group, so equal rewards have advantages too.
        return lambda scored: bool(np.isnan(scored.rewards).all())
    return lambda scored: has_zero_variance(scored, by_turn=config.turn_credit == "turn")


def _without_losers(advantages: AdvantageFn) -> AdvantageFn:
    """Return the function with 0 for its negative values: WAPO, arXiv:2606.16154. NaN stays NaN."""

    def positive(groups: Sequence[ScoredGroup]) -> list[GroupAdvantages]:
        return [np.maximum(values, np.float32(0)) for values in advantages(groups)]

    return positive
