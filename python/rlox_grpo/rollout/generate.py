"""What a step samples: groups of one size or several, and others in place of those that teach nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlox_grpo.groups import has_zero_std
from rlox_grpo.rollout.engines import GenerationEngine
from rlox_grpo.types import Prompt, RolloutGroup, Sampling, ScoredGroup


def generate(
    engine: GenerationEngine,
    prompts: Sequence[Prompt],
    group_sizes: Sequence[int],
    sampling: Sampling,
    seed: int,
    share: slice = slice(None),
) -> list[RolloutGroup]:
    """Sample ``group_sizes[i]`` completions for ``prompts[i]``, all in one call of the engine.

    Engines take one group size a call: the largest that divides all of these. Larger groups are asked for in parts.
    A rank that samples a ``share`` of the prompts gets what one process would have sampled for them.
    """
    unit = math.gcd(*group_sizes)
    parts = [size // unit for size in group_sizes]
    mine = list(zip(prompts, parts, strict=True))[share]
    if not mine:
        return []
    repeated = [prompt for prompt, count in mine for _ in range(count)]
    first = sum(parts[: share.start or 0])
    found = iter(engine.generate(repeated, unit, sampling, seed, first_prompt=first))
    return [_joined([next(found) for _ in range(count)]) for _, count in mine]


def _joined(groups: Sequence[RolloutGroup]) -> RolloutGroup:
    completions = tuple(completion for group in groups for completion in group.completions)
    return RolloutGroup(groups[0].prompt, completions, groups[0].policy_version)


@dataclass(frozen=True, eq=False)
class Rollout:
    """What a step sampled.

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
        """All of ``groups``, none replaced."""
        return cls(groups, groups)

    def metrics(self) -> dict[str, float]:
        """``rollout/groups`` sampled and ``rollout/groups_chosen``; ``rollout/refills``, where there were any."""
        metrics = {"rollout/groups": float(len(self.groups)), "rollout/groups_chosen": float(len(self.chosen))}
        return {**metrics, "rollout/refills": float(self.refills)} if self.refills else metrics


def refilled(
    groups: list[ScoredGroup],
    more: Callable[[int], list[ScoredGroup]],
    *,
    most_refills: int,
) -> Rollout:
    """Replace groups whose rewards are all equal by groups of other prompts.

    Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2).
    A group is judged by max − min of its rewards: a mean says nothing of spread, and a filter by the mean keeps groups
    of equal continuous rewards. Exactly as many groups are sampled as are missing, so nothing that was paid for is
    thrown away.

    Args:
        groups: the step's own.
        more: samples and scores that many groups of prompts not yet drawn.
        most_refills: times that it is called; a step may end with fewer groups than it began with.
    """
    sampled, chosen, refills = list(groups), [group for group in groups if not has_zero_std(group.rewards)], 0
    while len(chosen) < len(groups) and refills < most_refills:
        refills += 1
        found = more(len(groups) - len(chosen))
        sampled += found
        chosen += [group for group in found if not has_zero_std(group.rewards)]
    return Rollout(sampled, chosen, refills)
