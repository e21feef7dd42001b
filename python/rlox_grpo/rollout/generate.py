"""Sample a step's groups, and replace zero-variance groups (dynamic sampling)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlox_grpo.groups import has_zero_variance
from rlox_grpo.rollout.engines import GenerationEngine
from rlox_grpo.types import Prompt, RolloutGroup, Sampling, ScoredGroup


def generate(
    engine: GenerationEngine,
    prompts: Sequence[Prompt],
    group_sizes: Sequence[int],
    sampling: Sampling,
    seed: int,
    share: slice = slice(None),
    asked: slice | None = None,
) -> list[RolloutGroup]:
    """Sample ``group_sizes[i]`` completions for ``prompts[i]``, all in one call of the engine.

    Engines take one group size a call: the largest that divides all of these. Larger groups are asked for in parts.
    A rank that samples a ``share`` of the prompts gets what one process would have sampled for them.

    Args:
        engine: samples; see :class:`rlox_grpo.rollout.engines.GenerationEngine`.
        prompts: all prompts of the step, the same on every rank.
        group_sizes: completions for each of ``prompts``.
        sampling: the sampling parameters.
        seed: of the step.
        share: the prompts whose groups this rank gets.
        asked: the prompts that the engine samples, a slice that holds ``share``. Ranks that share one engine by tensor
            parallelism ask for the same prompts, and each keeps its share. None: ``share``.
    """
    unit = math.gcd(*group_sizes)
    parts = [size // unit for size in group_sizes]
    start, stop, _ = share.indices(len(prompts))
    first, last, _ = (asked or share).indices(len(prompts))
    sampled = list(zip(prompts, parts, strict=True))[first:last]
    if not sampled:
        return []
    repeated = [prompt for prompt, count in sampled for _ in range(count)]
    found = iter(engine.generate(repeated, unit, sampling, seed, first_prompt=sum(parts[:first])))
    groups = [_join_groups([next(found) for _ in range(count)]) for _, count in sampled]
    return groups[start - first : stop - first]


def _join_groups(groups: Sequence[RolloutGroup]) -> RolloutGroup:
    completions = tuple(completion for group in groups for completion in group.completions)
    return RolloutGroup(groups[0].prompt, completions, groups[0].policy_version)


@dataclass(frozen=True, eq=False)
class Rollout:
    """The groups of one step.

    Attributes:
        groups: Every group, in the order of sampling.
        chosen: Those of ``groups`` that the update is about.
        refills: Times that more was sampled.
    """

    groups: list[ScoredGroup]
    chosen: list[ScoredGroup]
    refills: int = 0

    @classmethod
    def of(cls, groups: list[ScoredGroup]) -> Rollout:
        """A rollout without replaced groups."""
        return cls(groups, groups)

    def metrics(self) -> dict[str, float]:
        """``rollout/groups`` sampled and ``rollout/groups_chosen``; ``rollout/refills``, where there were any."""
        metrics = {"rollout/groups": float(len(self.groups)), "rollout/groups_chosen": float(len(self.chosen))}
        return {**metrics, "rollout/refills": float(self.refills)} if self.refills else metrics


def refill_groups(
    groups: list[ScoredGroup],
    more: Callable[[int], list[ScoredGroup]],
    *,
    most_refills: int,
    by_turn: bool = False,
) -> Rollout:
    """Dynamic sampling: replace zero-variance groups by groups of new prompts.

    Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2).
    A group is judged by max − min of its rewards: a mean says nothing of spread, and a filter by the mean keeps groups
    of equal continuous rewards. Exactly as many groups are sampled as are missing, so nothing that was paid for is
    thrown away.

    Args:
        groups: the step's own.
        more: samples and scores that many groups of prompts not yet drawn.
        most_refills: times that it is called; a step may end with fewer groups than it began with.
        by_turn: whether a group is judged by the returns of each turn instead; see
            :func:`rlox_grpo.groups.has_zero_variance`.
    """
    sampled, refills = list(groups), 0
    chosen = [group for group in groups if not has_zero_variance(group, by_turn=by_turn)]
    while len(chosen) < len(groups) and refills < most_refills:
        refills += 1
        found = more(len(groups) - len(chosen))
        sampled += found
        chosen += [group for group in found if not has_zero_variance(group, by_turn=by_turn)]
    return Rollout(sampled, chosen, refills)
