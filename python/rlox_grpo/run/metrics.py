"""Metrics of one training step: a flat mapping from ``stage/name_unit`` to float."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlox_grpo.groups import (
    RIGHT,
    count_sampled,
    find_pictures,
    has_zero_variance,
    list_rows,
    select_sampled,
    was_shown,
)
from rlox_grpo.rewards import OUTCOMES, STATUSES
from rlox_grpo.rewards.verdicts import RARE
from rlox_grpo.run.usage import count_tokens
from rlox_grpo.types import FAILURES, Completion, Episode, Float32Array, Int64Array, ScoredGroup, UpdateStats

REPETITION_SAMPLES = 64
"""Repetition is measured on at most this many completions of a step: 0.1 s for completions of 8,192 tokens."""


def step_metrics(
    groups: Sequence[ScoredGroup],
    advantages: Float32Array,
    updates: UpdateStats | Sequence[UpdateStats],
    timings: Mapping[str, float],
    *,
    timed: Sequence[ScoredGroup] | None = None,
    constant: Sequence[bool] | None = None,
) -> dict[str, float]:
    """Compute the metrics of one training step. A metric without a value in this step is left out, never NaN.

    Args:
        groups: The scored groups of the step, before filtering.
        advantages: ``float32 [N]``, one for each sampled completion of the groups that are trained on, or ``[N, K]``,
            one for each turn and NaN after the last turn.
        updates: The optimizer steps in order; empty if all groups have zero variance.
        timings: Seconds by stage, ``{"rollout": 1.2, "update": 3.4, "step": 5.0}``. ``step``, if given, is the
            wall-clock time of the whole step. The part of this time outside of all stages becomes ``time/other_s``.
        timed: The groups that were sampled in the time of the stage ``rollout``, for ``perf/rollout_tokens_per_s``;
            None: all groups. Empty if the stage is a wait for groups whose sampling began earlier.
        constant: For each of ``groups``, whether all its advantages are 0; None: whether its rewards are equal.

    Returns:
        Means and standard deviations are over completions. ``std`` is the sample standard deviation (ddof 1), of at
        least two values. ``time/step_s`` is always the sum of the other ``time/*_s``. ``perf/tokens_per_s`` is the
        number of sampled tokens per second of the whole step, ``perf/rollout_tokens_per_s`` per second of the
        rollout, of the groups ``timed``.
    """
    times = _time_metrics(timings)
    metrics = {
        **_reward_metrics(groups, constant),
        **_completion_metrics(groups),
        **_spread("advantages", advantages, ("mean", "std", "min", "max")),
        **_update_metrics((updates,) if isinstance(updates, UpdateStats) else updates),
        **times,
    }
    _, num_tokens = count_tokens(groups)
    if times["time/step_s"] > 0:
        metrics["perf/tokens_per_s"] = num_tokens / times["time/step_s"]
    timed = groups if timed is None else timed
    if timed and times.get("time/rollout_s", 0.0) > 0:
        metrics["perf/rollout_tokens_per_s"] = count_tokens(timed)[1] / times["time/rollout_s"]
    return metrics


def _reward_metrics(groups: Sequence[ScoredGroup], constant: Sequence[bool] | None) -> dict[str, float]:
    if not groups:
        return {}
    metrics = _spread("reward", np.concatenate([scored.rewards for scored in groups]), ("mean", "std", "min", "max"))
    for name, arrays in by_name(scored.components for scored in groups).items():
        metrics |= _spread(f"rewards/{name}", np.concatenate(arrays), ("mean", "std"))
    for name, arrays in by_name(scored.measures for scored in groups).items():
        values = np.concatenate(arrays)
        if not np.isnan(values).all():
            metrics[f"rewards/{name}"] = float(np.nanmean(values.astype(np.float64)))
    metrics |= _shares([scored.statuses for scored in groups], STATUSES)
    metrics |= _shares([scored.outcomes for scored in groups], OUTCOMES)
    metrics["rollout/frac_reward_zero_std"] = _mean(_flag_constant(groups, constant))
    return metrics


def _flag_constant(groups: Sequence[ScoredGroup], constant: Sequence[bool] | None) -> Sequence[bool]:
    """Return ``constant``, or without it whether the rewards of each group are equal."""
    return [has_zero_variance(scored) for scored in groups] if constant is None else constant


def reward_times(groups: Iterable[ScoredGroup]) -> dict[str, float]:
    """Return ``rewards/<name>/time_s``, the seconds in each reward function, of the groups that one rank has scored."""
    seconds = by_name(scored.seconds for scored in groups)
    return {f"rewards/{name}/time_s": float(sum(values)) for name, values in seconds.items()}


def _shares(groups: Sequence[Mapping[str, NDArray[np.uint8]]], labels: Sequence[str]) -> dict[str, float]:
    """Return, for each function, the share of samples with each status except the first, ``ok``.

    A status in ``RARE`` is reported only if it occurs.
    """
    shares = {}
    for name, codes in by_name(groups).items():
        all_codes = np.concatenate(codes)
        for code, status in enumerate(labels[1:], 1):
            if status not in RARE or np.any(all_codes == code):
                shares[f"rewards/{name}/{status}"] = _mean(all_codes == code)
    return shares


def _completion_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    completions = [completion for scored in groups for completion in scored.group.completions]
    if not completions:
        return {}
    lengths = np.array([count_sampled(completion) for completion in completions], np.float64)
    truncated = np.array([completion.finish_reason == "length" for completion in completions])
    prompts = np.array([len(scored.group.prompt.token_ids) for scored in groups if was_shown(scored.group)], np.float64)
    metrics: dict[str, float] = {}
    if len(prompts):
        metrics |= {"prompts/mean_length": float(prompts.mean()), "prompts/max_length": float(prompts.max())}
    metrics |= {
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(truncated.mean()),
    }
    if not truncated.all():
        terminated = lengths[~truncated]
        metrics["completions/mean_terminated_length"] = float(terminated.mean())
        metrics["completions/min_terminated_length"] = float(terminated.min())
        metrics["completions/max_terminated_length"] = float(terminated.max())
    sizes = [
        row.sampling_mask.sizes
        for completion in completions
        for row in list_rows(completion)
        if row.sampling_mask is not None
    ]
    if sizes and (drawn := np.concatenate(sizes)).any():
        metrics["rollout/sampling_mask_size"] = float(drawn[drawn > 0].mean(dtype=np.float64))
    shown = completions[:: math.ceil(len(completions) / REPETITION_SAMPLES)]
    repeated = [share for completion in shown if (share := repeated_share(select_sampled(completion))) is not None]
    if repeated:
        metrics["completions/repeated_share"] = _mean(repeated)
    return metrics


def repeated_share(token_ids: Int64Array, size: int = 4) -> float | None:
    """Return the share of the n-grams in ``token_ids [T]``, n = ``size``, that occurred before; None if T < n."""
    if len(token_ids) < size:
        return None
    # Polynomial rolling hash (base: the golden ratio times 2^64, modulo 2^64) of each n-gram, vectorised over places.
    # Two different n-grams collide about once in 10^19. np.unique over the rows of [T, n] takes five times as long.
    runs = np.zeros(len(token_ids) - size + 1, np.uint64)
    for offset in range(size):
        runs = runs * np.uint64(0x9E3779B97F4A7C15) + token_ids[offset : offset + len(runs)].astype(np.uint64)
    return 1.0 - len(np.unique(runs)) / len(runs)


def _update_metrics(updates: Sequence[UpdateStats]) -> dict[str, float]:
    """Combine the optimizer steps of a training step: maxima and minima, the last learning rate, means of the rest."""
    if not updates:
        return {}
    metrics = {}
    for name, values in by_name(stats.metrics for stats in updates).items():
        combine = max if name.endswith("_max") else min if name.endswith("_min") else _mean
        metrics[name if "/" in name else f"policy/{name}"] = float(combine(values))
    metrics["update/grad_norm"] = _mean([stats.grad_norm for stats in updates])
    metrics["update/learning_rate"] = float(updates[-1].learning_rate)
    return metrics


def _time_metrics(timings: Mapping[str, float]) -> dict[str, float]:
    metrics = {f"time/{stage}_s": float(seconds) for stage, seconds in timings.items() if stage != "step"}
    if "step" in timings:
        # With overlapping stages (async generation) the sum can exceed the wall clock.
        metrics["time/other_s"] = max(0.0, timings["step"] - sum(metrics.values()))
    metrics["time/step_s"] = float(sum(metrics.values()))
    return metrics


def _spread(prefix: str, values: Float32Array, wanted: tuple[str, ...]) -> dict[str, float]:
    """Return statistics of the values that are not NaN, in float64; one that has no value is left out."""
    valid: NDArray[np.float64] = values[~np.isnan(values)].astype(np.float64)
    statistics: dict[str, float] = {}
    if len(valid) >= 1:
        statistics |= {"mean": valid.mean(), "min": valid.min(), "max": valid.max()}
    if len(valid) >= 2:
        statistics["std"] = valid.std(ddof=1)
    return {f"{prefix}/{name}": float(statistics[name]) for name in wanted if name in statistics}


def _mean(values: Sequence[float] | NDArray[np.bool_] | NDArray[np.float64]) -> float:
    return float(np.mean(values))


def by_name(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the values of each metric, from the rows that contain the metric.

    Names are in the order of their first row.
    """
    values: dict[str, list[Any]] = {}
    for row in rows:
        for name, value in row.items():
            values.setdefault(name, []).append(value)
    return values


def combined(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Combine the values of all ranks: sums of rates and counts, maxima and minima, means of the rest."""
    ways: list[tuple[tuple[str, ...], Callable[[Sequence[float]], float]]] = [
        (("_per_s", "/restarts", "/tower_pictures"), sum),
        (("_max", "/time_s", "/transfer_s", "/tower_seconds"), max),
        (("_min",), min),
    ]
    return {
        name: float(next((way for endings, way in ways if name.endswith(endings)), _mean)(rank_values))
        for name, rank_values in values.items()
    }


def source_metrics(groups: Sequence[ScoredGroup], constant: Sequence[bool] | None = None) -> dict[str, float]:
    """Compute the metrics of each source of a mixture; empty without a mixture. A metric without a value is left out.

    Args:
        groups: The scored groups of the step, before filtering.
        constant: For each of ``groups``, whether all its advantages are 0; None: whether its rewards are equal.

    Returns:
        By ``source/<name>/``: ``prompts``, the number of groups; ``reward``, the mean total; ``accuracy``, the share of
        right completions, whose first reward of the source is at least 1, among those with such a reward;
        ``pass_rate``, the share of prompts with a right completion, among the same; ``mean_length``, in sampled tokens;
        ``zero_variance_share``, the share of groups whose advantages are all 0.
    """
    metrics: dict[str, float] = {}
    flagged = zip(groups, _flag_constant(groups, constant), strict=True)
    named = [{name: pair} for pair in flagged if (name := pair[0].group.prompt.data_source) is not None]
    for name, pairs in by_name(named).items():
        sampled = [group for group, _ in pairs]
        right = [first[~np.isnan(first)] >= RIGHT for first in (group.first_rewards for group in sampled)]
        judged = [flags for flags in right if len(flags)]
        rewards = np.concatenate([group.rewards for group in sampled])
        lengths = [count_sampled(completion) for group in sampled for completion in group.group.completions]
        values = {
            "prompts": float(len(sampled)),
            "reward": _spread("", rewards, ("mean",)).get("/mean"),
            "accuracy": _mean(np.concatenate(judged)) if judged else None,
            "pass_rate": _mean([bool(flags.any()) for flags in judged]) if judged else None,
            "mean_length": _mean(lengths),
            "zero_variance_share": _mean([is_constant for _, is_constant in pairs]),
        }
        metrics |= {f"source/{name}/{metric}": value for metric, value in values.items() if value is not None}
    return metrics


def picture_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Compute the metrics of the pictures in the prompts and the episodes of a step; empty if there is none.

    Returns:
        ``images/per_prompt``, the mean number of pictures of a prompt; ``images/shown``, the number of pictures that
        the rows of the step show, with repeats; ``images/distinct``, the number of distinct pictures among these;
        ``images/tokens``, the mean number of tokens of a prompt's pictures; ``images/tokens_share``, the share of
        these tokens among those of all prompts.
    """
    prompts = [scored.group.prompt for scored in groups if was_shown(scored.group)]
    shown = [
        picture
        for scored in groups
        for completion in scored.group.completions
        for row in list_rows(completion)
        for picture in find_pictures(row, scored.group)
    ]
    if not shown:
        return {}
    tokens = sum(len(picture.token_ids) for prompt in prompts for picture in prompt.pictures)
    return {
        "images/per_prompt": sum(len(prompt.pictures) for prompt in prompts) / len(prompts),
        "images/shown": float(len(shown)),
        "images/distinct": float(len({picture.digest for picture in shown})),
        "images/tokens": tokens / len(prompts),
        "images/tokens_share": tokens / sum(len(prompt.token_ids) for prompt in prompts),
    }


def add_short_names(metrics: Mapping[str, float], progress: Mapping[str, float]) -> dict[str, float]:
    """Return ``metrics`` and ``progress`` with ``mean_reward`` and ``kl`` added; these are NaN if not measured."""
    nan = float("nan")
    named = {"mean_reward": metrics.get("reward/mean", nan), "kl": metrics.get("policy/kl", nan)}
    return {**metrics, **named, **progress}


def episode_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Compute the metrics of the episodes of a step; empty without an environment.

    ``environments/<name>/episodes`` counts the episodes of an environment, and ``environments/<name>/<reason>`` those
    that failed. Shares and means are over episodes; ``episode/observation_token_share`` is over the tokens after the
    prompts. A metric of the environment is the mean over the episodes that returned it.
    """
    completions = [completion for scored in groups for completion in scored.group.completions]
    played = [(c, c.episode) for c in completions if c.episode is not None]
    if not played:
        return {}
    episodes = [episode for _, episode in played]
    # Summaries of a compaction are replies in the rows, but no turns: max_turns does not count them.
    turns = np.array([sum(len(row.turns) for row in list_rows(c)) - len(episode.compactions) for c, episode in played])
    observed = sum(_count_observed(row) for completion, _ in played for row in list_rows(completion))
    tokens = observed + sum(count_sampled(completion) for completion, _ in played)
    metrics = {
        "episode/turns_mean": float(turns.mean()),
        "episode/turns_max": float(turns.max()),
        "episode/observation_token_share": observed / max(1, tokens),
    }
    for name in dict.fromkeys(episode.environment for episode in episodes):
        reasons = [episode.stop_reason for episode in episodes if episode.environment == name]
        metrics[f"environments/{name}/episodes"] = float(len(reasons))
        failures = [reason for reason in FAILURES if reason in reasons]
        metrics |= {f"environments/{name}/{reason}": float(reasons.count(reason)) for reason in failures}
    for reason in dict.fromkeys(episode.stop_reason for episode in episodes):
        metrics[f"episode/stop/{reason}"] = _mean([episode.stop_reason == reason for episode in episodes])
    if any(completion.branches for completion in completions):
        metrics["episode/branches"] = _mean([len(completion.branches) for completion, _ in played])
    if any(episode.cancelled_calls for episode in episodes):
        metrics["episode/cancelled_calls"] = _mean([episode.cancelled_calls for episode in episodes])
    if any(episode.tool_calls or episode.tool_errors for episode in episodes):
        for name in ("tool_calls", "tool_errors", "tool_seconds", "observations_cut"):
            metrics[f"episode/{name}"] = _mean([getattr(episode, name) for episode in episodes])
    elif any(episode.observations_cut for episode in episodes):  # messages of environments without tools are cut too
        metrics["episode/observations_cut"] = _mean([episode.observations_cut for episode in episodes])
    if any(episode.compactions for episode in episodes):
        metrics |= _measure_compactions(episodes, sum(count_sampled(completion) for completion, _ in played))
    if any(episode.parse_errors for episode in episodes):
        metrics["episode/parse_errors"] = _mean([episode.parse_errors for episode in episodes])
    for name, values in by_name(episode.metrics for episode in episodes).items():
        metrics[f"environment/{name}"] = _mean(values)
    return metrics


def _count_observed(row: Completion) -> int:
    """Return the tokens after the first sampled one that the policy did not sample.

    Tokens before it belong to the prompt, or in a branch to what the branch repeats.
    """
    if row.sampled is None or not row.sampled.any():
        return 0
    return int((~row.sampled[int(row.sampled.argmax()) :]).sum())


def _measure_compactions(episodes: Sequence[Episode], num_sampled: int) -> dict[str, float]:
    """Return the compactions of an episode, the tokens before and after one, and the share of summaries."""
    compactions = [compaction for episode in episodes for compaction in episode.compactions]
    before, after, summary = np.array(compactions, np.float64).T
    return {
        "episode/compactions": len(compactions) / len(episodes),
        "episode/compaction_tokens_before": _mean(before),
        "episode/compaction_tokens_after": _mean(after),
        "episode/summary_token_share": float(summary.sum()) / max(1, num_sampled),
    }
