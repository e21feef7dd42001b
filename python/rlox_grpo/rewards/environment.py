"""The reward of an environment, as a component in addition to those of the reward functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlox_grpo.rewards.calls import RewardError
from rlox_grpo.rewards.verdicts import BoolArray, Float64Array
from rlox_grpo.types import FAILURES, RolloutGroup, ScoredGroup


def find_failed(groups: Sequence[RolloutGroup]) -> BoolArray:
    """Return ``bool [N]``, True for the completions whose episode failed and has no reward."""
    episodes = [completion.episode for group in groups for completion in group.completions]
    return np.array(
        [episode is not None and episode.reward is None and episode.stop_reason in FAILURES for episode in episodes]
    )


def describe_failed(groups: Sequence[RolloutGroup]) -> str:
    """Describe how the episodes of ``groups`` ended, with the first error message."""
    episodes = [c.episode for group in groups for c in group.completions if c.episode is not None]
    reasons = dict.fromkeys(episode.stop_reason for episode in episodes)
    errors = [episode.error for episode in episodes if episode.error]
    return (
        f"{len(episodes)} episodes; they ended by {', '.join(reasons)}"
        f"{f'; the first error: {errors[0]}' if errors else ''}"
    )


class EnvironmentReward:
    """The reward that an environment returned for its episodes. Episodes without a reward have no score."""

    weight = 1.0

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __eq__(self, other: object) -> bool:
        """Whether both are of the environment with this name."""
        return isinstance(other, EnvironmentReward) and self.__name__ == other.__name__

    def __hash__(self) -> int:
        return hash(self.__name__)

    def __call__(self, *args: Any, **columns: Any) -> Any:
        """Raise RewardError: an environment scores its own episodes, not texts."""
        raise RewardError(f"{self.__name__} is an environment: it scores its own episodes, not texts")

    def read(self, groups: Sequence[RolloutGroup]) -> Float64Array:
        """Return the rewards of all completions, ``float64 [N]``, NaN for episodes without a reward."""
        episodes = [completion.episode for group in groups for completion in group.completions]
        # NumPy reads None as NaN.
        return np.array([None if episode is None else episode.reward for episode in episodes], dtype=np.float64)


def subtract_parse_errors(scored: ScoredGroup, penalty: float) -> ScoredGroup:
    """Subtract ``penalty`` from the total reward for each reply with a tool call that cannot be parsed.

    An episode without a score stays without one.
    """
    episodes = [completion.episode for completion in scored.group.completions]
    errors = np.array([0 if episode is None else episode.parse_errors for episode in episodes], dtype=np.float32)
    return replace(scored, rewards=scored.rewards - np.float32(penalty) * errors)


def add_turn_rewards(scored: ScoredGroup, weight: float) -> ScoredGroup:
    """Add the reward of each turn, times the weight of the environment; 0 for turns without a reward."""
    completions = scored.group.completions
    paid = [None if completion.episode is None else completion.episode.turn_rewards for completion in completions]
    if all(rewards is None for rewards in paid):
        return scored
    rows = [
        np.zeros(max(1, len(completion.turns)), dtype=np.float32)
        if rewards is None
        else np.asarray(rewards, dtype=np.float32) * np.float32(weight)
        for completion, rewards in zip(completions, paid, strict=True)
    ]
    return replace(scored, turn_rewards=tuple(rows))
