"""Rewards by source: each source of a mixture may have reward functions of its own, which score its rows alone."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from rlox_grpo.rewards.calls import RewardFn
from rlox_grpo.rewards.environment import EnvironmentReward, describe_failed, find_failed
from rlox_grpo.rewards.scoring import RewardBatch, make_unique_names, reward_weights, score_batches
from rlox_grpo.rewards.verdicts import AsyncRule, Rule
from rlox_grpo.rewards.workers import InWorkers
from rlox_grpo.types import RolloutGroup, ScoredGroup

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Scorer:
    """The reward functions of a run with their weights, and those that sources of a mixture use instead.

    Attributes:
        functions: the reward functions of the run, which score every row whose source has no reward functions.
        weights: one for each of ``functions``; None: their own.
        by_source: the functions of the sources that have their own.
        source_weights: one for each function of a source; those of other sources have the weights that they have
            themselves.
    """

    functions: Sequence[RewardFn]
    weights: Sequence[float] | None = None
    by_source: Mapping[str, Sequence[RewardFn]] = field(default_factory=dict)
    source_weights: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def list_all(self) -> list[RewardFn]:
        """Return every function: those of the run, then the others, in the order of the sources.

        Equal functions of several sources are listed once, or once for each weight that they have.
        """
        return [function for function, _ in self._list_weighed()]

    def list_weights(self) -> list[float]:
        """Return the weight of each function of :meth:`list_all`."""
        return [weight for _, weight in self._list_weighed()]

    def weigh_sources(self) -> dict[str, list[float]]:
        """Return the weights of each source's own functions, in their order, by the name of the source."""
        return {source: [weight for _, weight in self._weigh(source)] for source in self.by_source}

    def _weigh(self, source: str | None) -> list[tuple[RewardFn, float]]:
        """Return the functions that score a source with their weights; None: those of the run."""
        functions, weights = self.functions, self.weights
        if source is not None:
            functions, weights = self.by_source[source], self.source_weights.get(source)
        return list(zip(functions, reward_weights(functions, weights), strict=True)) if functions else []

    def _list_weighed(self) -> list[tuple[RewardFn, float]]:
        """Return the functions of :meth:`list_all`, each with its weight."""
        listed = self._weigh(None)
        for source in self.by_source:
            weighed = self._weigh(source)
            for (function, weight), index in zip(weighed, _match(weighed, listed), strict=True):
                if index is None:
                    # Equal judges are one object, also with two weights, because they share one limit of requests.
                    same = next((other for other, _ in listed if _is_same(function, other)), function)
                    listed.append((same, weight))
        return listed

    def score(self, groups: Sequence[RolloutGroup], on_error: Literal["stop", "none"] = "stop") -> list[ScoredGroup]:
        """Score every completion with the functions of its source, as :func:`.scoring.score_batches` does.

        Each function is called once for each set of functions that it is part of: the rows of all sources without
        functions of their own are one batch, and the rows of each other source are one. Async functions of all batches
        wait together. Every group has the components of all functions, NaN for those of other sources.
        """
        if not self.by_source:
            return score_batches([RewardBatch(groups, self.functions, self.weights)], on_error)[0]
        weighed = self._list_weighed()
        listed, weights = [function for function, _ in weighed], [weight for _, weight in weighed]
        names = make_unique_names(listed)
        batches: dict[str | None, list[int]] = {}  # positions in `groups`
        for position, group in enumerate(groups):
            source = group.prompt.data_source
            batches.setdefault(source if source in self.by_source else None, []).append(position)
        requests, judges = [], []  # a judge is the name of the first function, which says whether a completion is right
        for source, positions in batches.items():
            chosen = [index for index in _match(self._weigh(source), weighed) if index is not None]
            requests.append(
                RewardBatch(
                    [groups[position] for position in positions],
                    [listed[index] for index in chosen],
                    [weights[index] for index in chosen],
                    [names[index] for index in chosen],
                )
            )
            judges.append(names[chosen[0]])
        if len(batches) > 1:
            _warn_about_failed_sources([request.groups for request in requests])
        scored: dict[int, ScoredGroup] = {}
        for positions, judge, results in zip(batches.values(), judges, score_batches(requests, on_error), strict=True):
            for position, scored_group in zip(positions, results, strict=True):
                scored[position] = _with_components(scored_group, names, judged_by=judge)
        return [scored[position] for position in range(len(groups))]


def _warn_about_failed_sources(sources: Sequence[Sequence[RolloutGroup]]) -> None:
    """Warn of each of several sources whose environment is down: the others go on."""
    for groups in sources:
        if find_failed(groups).all():
            logger.warning(
                "all episodes of a source failed, and are not trained on: %s: %s",
                *(groups[0].prompt.data_source, describe_failed(groups)),
            )


def _match(functions: Sequence[tuple[RewardFn, float]], listed: Sequence[tuple[RewardFn, float]]) -> list[int | None]:
    """Return the index in ``listed`` of each of ``functions``, each index once; None where it is not there.

    A function with another weight is another one: its scores count otherwise in the total.
    """
    matches: list[int | None] = []
    for function, weight in functions:
        same = (
            index
            for index, (other, factor) in enumerate(listed)
            if index not in matches and weight == factor and _is_same(function, other)
        )
        matches.append(next(same, None))
    return matches


def _is_same(function: RewardFn, other: RewardFn) -> bool:
    """Whether two functions are one; rules and environments, and functions in workers, if they are equal."""
    compares = isinstance(function, (Rule, AsyncRule, InWorkers, EnvironmentReward)) and type(function) is type(other)
    return function is other or (compares and bool(function == other))


def _with_components(scored: ScoredGroup, names: Sequence[str], judged_by: str) -> ScoredGroup:
    """Return the group with a component for each of ``names``, NaN where a function is not that of its source."""
    size = len(scored.rewards)
    components = {name: scored.components.get(name, np.full(size, np.nan, np.float32)) for name in names}
    seconds = {name: scored.seconds.get(name, 0.0) for name in names}
    return replace(scored, components=components, seconds=seconds, judged_by=judged_by)
