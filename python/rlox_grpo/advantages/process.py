"""Advantages from the scores of steps: process supervision (DeepSeekMath, arXiv:2402.03300, section 4.1.3)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlox_grpo.advantages.form import AdvantageFn, GroupAdvantages
from rlox_grpo.config.records import AdvantageConfig, StageConfigs
from rlox_grpo.config.records.loss import SEQUENCE_RATIO_LOSSES
from rlox_grpo.errors import ConfigError
from rlox_grpo.groups import flag_sampled, has_zero_std
from rlox_grpo.rewards.verdicts import sum_weighted
from rlox_grpo.types import Float32Array, ScoredGroup


def step_advantages(
    ends: Sequence[Sequence[int]],
    scores: Sequence[Sequence[float]],
    lengths: Sequence[int],
    *,
    scaling: str = "group",
    ddof: int = 1,
    std_epsilon: float = 1e-4,
) -> list[NDArray[np.float64]]:
    """Return the advantage of each token of one group's completions, ``float64 [T_i]`` for each.

    All step scores of the group are normalised together: s̃ = (s − mean) / (sd + std_epsilon). The advantage of a token
    is the sum of s̃ over the steps that end at it or later. The advantage is exactly 0 where all scores are equal.

    Example: ``scaling="none"``, ends ``1 3`` and ``2``, scores ``1 0`` and ``2``, lengths ``3`` and ``2``. The mean is
    1, so s̃ is 0 and −1 for the two steps of the first completion, and 1 for the step of the second. Token 0 of the
    first completion has 0 − 1, its tokens 1 and 2 have −1; the tokens of the second have 1.

    Args:
        ends: for each completion the offset after the last token of each step, ascending.
        scores: for each completion the score of each step.
        lengths: the number of tokens of each completion.
        scaling: ``"group"`` divides by the standard deviation, ``"none"`` does not.
        ddof, std_epsilon: as in :func:`rlox_grpo.advantages.group_advantages`.
    """
    pooled = np.array([score for steps in scores for score in steps], np.float64)  # [all steps of the group]
    advantages = [np.zeros(length) for length in lengths]
    if not len(pooled) or pooled.max() == pooled.min() or (scaling == "group" and len(pooled) <= ddof):
        return advantages
    mean = pooled.mean()
    scale = 1.0 if scaling == "none" else 1.0 / (pooled.std(ddof=ddof) + std_epsilon)
    for row, stops, values in zip(advantages, ends, scores, strict=True):
        for stop, value in zip(stops, values, strict=True):
            row[:stop] += (value - mean) * scale  # the tokens before the offset: the step ends at them or later
    return advantages


def with_step_advantages(outcome: AdvantageFn, config: AdvantageConfig, weights: Sequence[float]) -> AdvantageFn:
    """Return ``outcome`` with the advantages of steps added, for groups that have scores of steps.

    The advantage of a token is that of its completion, from the weighted total of the functions that return numbers,
    plus :func:`step_advantages` of the functions that return StepScores, each score times the weight of its function.
    :func:`refuse_other_options` says which options are read.
    """

    def advantages(groups: Sequence[ScoredGroup]) -> Sequence[GroupAdvantages]:
        if not any(group.step_scores for group in groups):
            return outcome(groups)
        factors = dict(zip(groups[0].components, weights, strict=True))
        with_steps = {name for group in groups for name in group.step_scores}
        if with_steps == factors.keys():
            completion_advantages: Sequence[Any] = [np.zeros(len(group.rewards)) for group in groups]
        else:
            completion_advantages = outcome(
                [replace(group, rewards=_sum_others(group, with_steps, factors)) for group in groups]
            )
        return [
            _add(group, factors, outcomes, config)
            for group, outcomes in zip(groups, completion_advantages, strict=True)
        ]

    return advantages


def has_equal_steps(scored: ScoredGroup, weights: Sequence[float]) -> bool:
    """Return whether all weighted step scores of a group are equal, and so are its completions' other rewards.

    The other rewards are the weighted sums of the functions that return numbers. ``weights`` has one weight for each
    reward component.
    """
    factors = dict(zip(scored.components, weights, strict=True))
    pooled = {score for scores in _list_steps(scored, factors)[1] for score in scores}
    if scored.step_scores.keys() == factors.keys():
        return len(pooled) <= 1
    return len(pooled) <= 1 and has_zero_std(_sum_others(scored, scored.step_scores, factors))


def _list_steps(scored: ScoredGroup, factors: dict[str, float]) -> tuple[list[list[int]], list[list[float]]]:
    """Return the ends of the steps of each completion, and their scores times the weights of their functions."""
    completions = scored.group.completions
    ends: list[list[int]] = [[] for _ in completions]
    scores: list[list[float]] = [[] for _ in completions]
    for name, group_steps in scored.step_scores.items():
        if factors[name] == 0:  # only measured
            continue
        for index, steps in enumerate(group_steps):
            if steps is not None and not np.isnan(scored.rewards[index]):  # a sample that failed has no score
                ends[index] += steps.ends
                scores[index] += [factors[name] * score for score in steps.scores]
    return ends, scores


def _add(scored: ScoredGroup, factors: dict[str, float], outcome: Any, config: AdvantageConfig) -> list[Float32Array]:
    """Return the advantages of a group's tokens, ``float32 [T_i]`` for each completion."""
    completions = scored.group.completions
    ends, scores = _list_steps(scored, factors)
    lengths = [len(completion.token_ids) for completion in completions]
    options: dict[str, Any] = {"scaling": config.reward_scaling, "ddof": config.ddof, "std_epsilon": config.std_epsilon}
    token_advantages = step_advantages(ends, scores, lengths, **options)
    return [
        np.where(flag_sampled(completion), token_values + float(np.nan_to_num(whole)), 0.0).astype(np.float32)
        for completion, token_values, whole in zip(completions, token_advantages, outcome, strict=True)
    ]


def _sum_others(scored: ScoredGroup, with_steps: Collection[str], factors: dict[str, float]) -> Float32Array:
    """Return the weighted total of the functions without steps, ``float32 [G]``; NaN where none of them applies.

    The total is the sum of these scores, and not a difference of totals: equal scores stay exactly equal.
    """
    names = [name for name in factors if name not in with_steps]
    scores = [scored.components[name].astype(np.float64) for name in names]
    total = sum_weighted(scores, [factors[name] for name in names])
    return np.where(np.isnan(scored.rewards), np.nan, total).astype(np.float32)


def refuse_other_options(stages: StageConfigs, name: str) -> None:
    """Raise ConfigError for an option that scores of steps cannot use; ``name`` is the function that returns them."""
    options = {**dict(stages.advantages), **dict(stages.loss), **dict(stages.episodes)}
    wanted: dict[str, tuple[Any, ...]] = {"kl_in": ("loss",)}
    if stages.advantages.advantage_fn is None:
        wanted |= {"reward_scaling": ("group", "none"), "baseline": ("mean",), "turn_credit": ("episode",)}
        wanted |= {"reward_aggregation": ("sum_then_normalize",), "negative_advantages": ("keep",)}
        # The penalty is of the total of the episode, which the advantages of steps do not read.
        wanted |= {"parse_error_penalty": (0.0,)}
        if stages.loss.policy_loss in SEQUENCE_RATIO_LOSSES:
            # The ratio is one for the sequence, and would spread the score of a step over all tokens.
            wanted |= {"policy_loss": ("gspo_token", "clip")}
    for option, values in wanted.items():
        if (value := options[option]) not in values:
            others = "" if option == "kl_in" else ", or give an advantage_fn"
            raise ConfigError(
                f"{option}={value!r} with a reward function that returns StepScores, {name}: set {option}="
                f"{' or '.join(map(repr, values))}{others}"
            )
