"""Sample a step's groups, and replace zero-variance groups (dynamic sampling)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from rlox_grpo.config.records.option import is_custom
from rlox_grpo.errors import EngineError
from rlox_grpo.groups import has_zero_variance
from rlox_grpo.rollout.engines import GenerationEngine
from rlox_grpo.rollout.engines.custom_engine import check_groups
from rlox_grpo.types import Prompt, RolloutGroup, Sampling, ScoredGroup


class Generate(Protocol):
    """Samples the groups of a step from an engine: :func:`generate`, or the ``EpisodeRunner`` of an environment."""

    def __call__(
        self,
        engine: GenerationEngine,
        prompts: Sequence[Prompt],
        group_sizes: Sequence[int],
        sampling: Sampling,
        seed: int,
        share: slice = ...,
        engine_share: slice | None = ...,
    ) -> list[RolloutGroup]:
        """Sample ``group_sizes[i]`` completions for ``prompts[i]``; see :func:`generate`."""
        ...


def generate(
    engine: GenerationEngine,
    prompts: Sequence[Prompt],
    group_sizes: Sequence[int],
    sampling: Sampling,
    seed: int,
    share: slice = slice(None),
    engine_share: slice | None = None,
) -> list[RolloutGroup]:
    """Sample ``group_sizes[i]`` completions for ``prompts[i]``, all in one call of the engine.

    An engine takes one group size for all prompts: the greatest common divisor of ``group_sizes``. A prompt with a
    larger group is repeated: for the sizes 4 and 6, the engine samples groups of 2, with the first prompt twice and
    the second three times.

    A completion depends on the index of its prompt in ``prompts``, so that all ranks together sample what one process
    would.

    Args:
        engine: the generation engine; see :class:`rlox_grpo.rollout.engines.GenerationEngine`.
        prompts: all prompts of the step, the same on every rank.
        group_sizes: completions for each of ``prompts``.
        sampling: the sampling parameters.
        seed: seed of the step.
        share: the prompts whose groups this rank gets.
        engine_share: the prompts that the engine samples, a slice that contains ``share``. Ranks that share one engine
            by tensor parallelism sample the same prompts, and each rank returns its share. None: ``share``.
    """
    unit = math.gcd(*group_sizes)
    calls_per_group = [size // unit for size in group_sizes]
    start, stop, _ = share.indices(len(prompts))
    first, last, _ = (engine_share or share).indices(len(prompts))
    sampled = list(zip(prompts, calls_per_group, strict=True))[first:last]
    if not sampled:
        return []
    repeated = [prompt for prompt, count in sampled for _ in range(count)]
    returned = engine.generate(repeated, unit, sampling, seed, first_prompt=sum(calls_per_group[:first]))
    _refuse_other_groups(type(engine).__name__, returned, repeated, unit)
    results = iter(returned)
    groups = []
    for prompt, count in sampled:
        group_calls = [next(results) for _ in range(count)]
        completions = tuple(completion for group in group_calls for completion in group.completions)
        groups.append(RolloutGroup(prompt, completions, group_calls[0].policy_version))
    return groups[start - first : stop - first]


def choose_generate(engine: Any, vocabulary: int | None) -> Generate:
    """Return what samples single replies: for a custom engine, the option ``engine``, with a check of its completions.

    ``vocabulary`` is the number of token ids; None: unknown.
    """
    return partial(_generate_checked, vocabulary) if is_custom(engine) else generate


def _generate_checked(
    vocabulary: int | None,
    engine: GenerationEngine,
    prompts: Sequence[Prompt],
    group_sizes: Sequence[int],
    sampling: Sampling,
    seed: int,
    share: slice,
    engine_share: slice | None,
) -> list[RolloutGroup]:
    """Like :func:`generate`, with a custom engine, whose completions are checked.

    Raises:
        EngineError: see :func:`rlox_grpo.rollout.engines.custom_engine.check_groups`.
    """
    groups = generate(engine, prompts, group_sizes, sampling, seed, share, engine_share)
    check_groups(engine, groups, sampling.max_new_tokens, vocabulary)
    return groups


def _refuse_other_groups(engine: str, groups: Any, prompts: Sequence[Prompt], group_size: int) -> None:
    """Raise EngineError unless there is one group of ``group_size`` completions for each prompt, in their order."""
    if not isinstance(groups, (list, tuple)) or len(groups) != len(prompts):
        got = f"{len(groups)} groups" if isinstance(groups, (list, tuple)) else type(groups).__name__
        raise EngineError(
            f"engine {engine} returned {got} for {len(prompts)} prompts: expected a RolloutGroup for each"
        )
    for index, (group, prompt) in enumerate(zip(groups, prompts, strict=True)):
        if not isinstance(group, RolloutGroup):
            raise EngineError(f"engine {engine}: group {index} is {type(group).__name__}, expected a RolloutGroup")
        if group.prompt.index != prompt.index:
            raise EngineError(
                f"engine {engine}: group {index} is of {group.prompt.name}, expected {prompt.name}"
                ": return the groups in the order of the prompts"
            )
        if len(group.completions) != group_size:
            raise EngineError(
                f"engine {engine} returned {len(group.completions)} completions for {prompt.name}, expected "
                f"{group_size}"
            )


@dataclass(frozen=True, eq=False)
class Rollout:
    """The groups of one step.

    Attributes:
        groups: all sampled groups, in the order of sampling.
        chosen: the groups that are trained on.
        refills: number of times that replacements were sampled; None: groups are not replaced.
        num_replacements: the last groups of ``groups``, which are replacements.
    """

    groups: list[ScoredGroup]
    chosen: list[ScoredGroup]
    refills: int | None = None
    num_replacements: int = 0

    @property
    def first_groups(self) -> list[ScoredGroup]:
        """The groups of the step's prompts, without replacements."""
        return self.groups[: len(self.groups) - self.num_replacements]

    def metrics(self) -> dict[str, float]:
        """Return the counts ``rollout/groups``, ``groups_chosen``, ``completions`` and, with refills, ``refills``."""
        metrics = {
            "rollout/groups": float(len(self.groups)),
            "rollout/groups_chosen": float(len(self.chosen)),
            "rollout/completions": float(sum(len(scored.rewards) for scored in self.groups)),
        }
        return {**metrics, "rollout/refills": float(self.refills)} if self.refills is not None else metrics


def refill_groups(
    groups: list[ScoredGroup],
    more: Callable[[int], list[ScoredGroup]],
    *,
    most_refills: int,
    is_constant: Callable[[ScoredGroup], bool] = has_zero_variance,
) -> Rollout:
    """Replace zero-variance groups by groups of new prompts: dynamic sampling (DAPO, arXiv:2503.14476, section 3.2).

    Each refill samples exactly as many groups as are missing, so no group with variance is dropped.

    Args:
        groups: the groups of the step's prompts.
        more: ``more(count)`` samples and scores ``count`` groups of new prompts.
        most_refills: maximum number of calls of ``more``. If groups are still missing after them, the step has fewer
            groups.
        is_constant: whether all advantages of a group are 0.
    """
    sampled, refills = list(groups), 0
    chosen = [group for group in groups if not is_constant(group)]
    while len(chosen) < len(groups) and refills < most_refills:
        refills += 1
        refill = more(len(groups) - len(chosen))
        sampled += refill
        chosen += [group for group in refill if not is_constant(group)]
    return Rollout(sampled, chosen, refills, len(sampled) - len(groups))
