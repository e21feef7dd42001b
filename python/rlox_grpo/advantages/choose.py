"""Choose the built-in advantages by the options: ``baseline``, ``reward_scaling``, ``turn_credit`` and so on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlox_grpo.advantages.component import component_advantages
from rlox_grpo.advantages.gae import gae_advantages
from rlox_grpo.advantages.group import Baseline, Scaling, group_advantages
from rlox_grpo.advantages.mean_scaled import mean_scaled_advantages
from rlox_grpo.advantages.turn import turn_advantages
from rlox_grpo.groups import (
    compute_group_offsets,
    compute_turn_returns,
    compute_turn_rewards,
    has_equal_state_returns,
    has_zero_variance,
    number_states,
)

if TYPE_CHECKING:
    from rlox_grpo.config.records import AdvantageConfig
    from rlox_grpo.types import ScoredGroup


def make_advantages(
    config: AdvantageConfig, weights: Sequence[float]
) -> Callable[[NDArray[Any], NDArray[np.int64], Mapping[str, NDArray[Any]]], NDArray[np.float32]]:
    """Return the function from rewards ``[N]``, group offsets ``[B + 1]`` and components to advantages ``float32 [N]``.

    Args:
        config: the options.
        weights: one for each reward component.
    """
    baseline: Baseline = "leave_one_out" if config.baseline == "leave_one_out" else "mean"
    options: dict[str, Any] = {"ddof": config.ddof, "std_epsilon": config.std_epsilon}

    def advantages(
        rewards: NDArray[Any], offsets: NDArray[np.int64], components: Mapping[str, NDArray[Any]]
    ) -> NDArray[np.float32]:
        if config.baseline == "batch":  # treat the batch as one group
            scaling: Scaling = "group" if config.reward_scaling == "batch" else "none"
            return group_advantages(rewards, len(rewards), scaling=scaling, **options)
        if config.baseline == "optimal_token":  # the learner replaces them once it has the forward pass
            return group_advantages(rewards, group_offsets=offsets, scaling="none")
        if config.reward_aggregation == "normalize_then_sum":
            own = list(components.values())
            return component_advantages(own, weights, group_offsets=offsets, baseline=baseline, **options)
        if config.reward_scaling == "mean":
            return mean_scaled_advantages(rewards, offsets, std_epsilon=config.std_epsilon)
        if config.reward_scaling == "whiten":
            centred = group_advantages(rewards, group_offsets=offsets, scaling="none", baseline=baseline)
            valid = centred[~np.isnan(rewards)].astype(np.float64)
            if len(valid) <= config.ddof:  # no standard deviation; epsilon alone would be no scale
                return np.zeros(len(centred), np.float32)
            spread = float(valid.std(ddof=config.ddof))
            scaled: NDArray[np.float32] = (centred / max(spread + config.std_epsilon, 1e-30)).astype(np.float32)
            return scaled
        return group_advantages(
            rewards, group_offsets=offsets, scaling=config.reward_scaling, baseline=baseline, **options
        )

    return _without_losers(advantages) if config.negative_advantages == "zero" else advantages


def make_turn_advantages(
    config: AdvantageConfig,
) -> Callable[[Sequence[ScoredGroup], NDArray[np.float32]], NDArray[np.float32]]:
    """Return the function from groups and their rewards ``[N]`` to the advantages of turns, ``float32 [N, K]``.

    It is :func:`turn_advantages` or :func:`gae_advantages` with the options of ``config``, by ``turn_credit``.
    """
    options: dict[str, Any] = {
        "scaling": "none" if config.reward_scaling == "none" else "group",
        "ddof": config.ddof,
        "std_epsilon": config.std_epsilon,
    }

    def of_turns(groups: Sequence[ScoredGroup], rewards: NDArray[np.float32]) -> NDArray[np.float32]:
        baseline: Baseline = "leave_one_out" if config.baseline == "leave_one_out" else "mean"
        returns, turns = compute_turn_returns(groups, rewards)
        return turn_advantages(returns, turns, compute_group_offsets(groups), baseline=baseline, **options)

    def of_states(groups: Sequence[ScoredGroup], rewards: NDArray[np.float32]) -> NDArray[np.float32]:
        return gae_advantages(
            compute_turn_rewards(groups, rewards)[0],
            number_states(groups, config.turn_state),
            compute_group_offsets(groups),
            discount=config.turn_discount,
            trace_decay=config.turn_lambda,
            **options,
        )

    advantages = of_states if config.turn_credit == "gae" else of_turns
    return _without_losers(advantages) if config.negative_advantages == "zero" else advantages


def make_zero_variance_test(config: AdvantageConfig) -> Callable[[ScoredGroup], bool]:
    """Return the function that tells whether all advantages of a group are 0, by ``turn_credit``."""
    if config.turn_credit == "gae":
        return lambda scored: has_equal_state_returns(scored, config.turn_discount, config.turn_state)
    return lambda scored: has_zero_variance(scored, by_turn=config.turn_credit == "turn")


def _without_losers(advantages: Callable[..., NDArray[np.float32]]) -> Callable[..., NDArray[np.float32]]:
    """Return the function with 0 for its negative values: WAPO, arXiv:2606.16154. NaN stays NaN."""
    return lambda *arguments: np.maximum(advantages(*arguments), np.float32(0))
