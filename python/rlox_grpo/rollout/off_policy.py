"""Completions that the policy did not sample in this step: demonstrations, and replays of earlier steps.

A demonstration is scored with the samples of its prompt. Metrics of the rollout are of the samples alone; the groups
that are trained have the demonstrations and the replays after the samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlox_grpo.config.records import OffPolicyConfig
from rlox_grpo.groups import find_origin, is_right, select_completions
from rlox_grpo.rollout.replay import Replay
from rlox_grpo.types import Completion, Float32Array, Int64Array, RolloutGroup, ScoredGroup


@dataclass(eq=False)
class OffPolicy:
    """Adds demonstrations and replays to the groups of a step.

    Attributes:
        config: when they join their groups.
        demo_loss: the option; None: demonstrations are not used.
        replay: the stored completions; None without ``replay``.
    """

    config: OffPolicyConfig
    demo_loss: Any
    replay: Replay | None = field(init=False)
    _metrics: dict[str, float] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.replay = None if self.config.replay == "none" else Replay(self.config)

    def add_demonstrations(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        """Return the sampled groups, with the demonstration of its prompt at the end of each, to be scored with it."""
        if self.demo_loss is None:
            return list(groups)
        return [
            group
            if (ids := group.prompt.demonstration) is None
            else replace(group, completions=(*group.completions, make_demonstration(ids)))
            for group in groups
        ]

    def split(self, scored: Sequence[ScoredGroup], version: int) -> tuple[list[ScoredGroup], list[ScoredGroup]]:
        """Return the groups of the samples alone, and the groups that are trained on.

        ``version`` is the version of the weights that the step updates.
        """
        sampled = [select_completions(group, find_origin(group, None)) for group in scored]
        trained = list(scored)
        if self.config.demo_when == "none_right":
            trained = [
                samples if is_right(samples).any() else group for group, samples in zip(scored, sampled, strict=True)
            ]
        self._metrics = {} if self.demo_loss is None else _measure_demonstrations(trained)
        return sampled, trained if self.replay is None else self.replay.join(trained, sampled, version)

    def hide_rewards(self, scored: Sequence[ScoredGroup]) -> list[ScoredGroup]:
        """Return the groups for the advantages: without ``demo_in_baseline`` the demonstrations of ``ce`` have none."""
        if self.demo_loss != "ce" or self.config.demo_in_baseline:
            return list(scored)
        return [_hide(group, find_origin(group, "demonstration")) for group in scored]

    def finish(self, sampled: Sequence[ScoredGroup], version: int) -> dict[str, float]:
        """Store what a later step may replay, after the update. Return ``demo/*`` and ``replay/*`` of the step."""
        return {**self._metrics, **({} if self.replay is None else self.replay.finish(sampled, version))}

    def state_dict(self) -> dict[str, Any]:
        """Return the stored completions as JSON values for a checkpoint."""
        return {} if self.replay is None else self.replay.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of :meth:`state_dict`."""
        if self.replay is not None:
            self.replay.load_state_dict(state)


def make_demonstration(token_ids: Int64Array) -> Completion:
    """Return a demonstration as a completion. Its log-probs are 0, because no policy sampled it."""
    return Completion(token_ids, np.zeros(len(token_ids), np.float32), "stop", origin="demonstration")


def _hide(scored: ScoredGroup, rows: Sequence[int]) -> ScoredGroup:
    """Return the group with NaN as the rewards of the completions ``rows``, as if they were not scored."""
    if not rows:
        return scored

    def hide(values: Float32Array) -> Float32Array:
        hidden: Float32Array = values.copy()
        hidden[rows] = np.nan
        return hidden

    components = {name: hide(values) for name, values in scored.components.items()}
    return replace(scored, rewards=hide(scored.rewards), components=components)


def _measure_demonstrations(trained: Sequence[ScoredGroup]) -> dict[str, float]:
    """Return the number of demonstrations in the groups, their mean reward and the share that is right."""
    shown = [select_completions(group, find_origin(group, "demonstration")) for group in trained]
    rewards = np.concatenate([np.zeros(0), *(group.rewards for group in shown)])
    metrics = {"demo/used": float(len(rewards))}
    if np.isfinite(rewards).any():
        right = np.concatenate([is_right(group) for group in shown])
        metrics |= {"demo/reward_mean": float(np.nanmean(rewards)), "demo/right_share": float(right.mean())}
    return metrics
