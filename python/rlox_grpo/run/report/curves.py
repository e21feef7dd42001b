"""The charts of a report: the main ones in a fixed order, then one for each other metric."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from rlox_grpo.config.eval_set import TAKEN
from rlox_grpo.rewards import OUTCOMES, STATUSES
from rlox_grpo.rewards.judge.judge import NO_CRITERIA
from rlox_grpo.run.console import list_set_accuracies, shows_accuracy
from rlox_grpo.run.report.charts import Chart, compare, draw
from rlox_grpo.run.report.evaluations import chart_sets
from rlox_grpo.run.report.read import Run, Table, column
from rlox_grpo.run.report.repeats import average

_UNSCORED = (*STATUSES[1:], *OUTCOMES[1:])
_MAX_MORE = 200
_MEASURE = re.compile(r"((?:[^/]+/)?)rewards/([^/]+)/([^/]+)")
_UPDATED = "gaps: steps without an update, as all groups had constant rewards"

# Title, note, unit, and the metrics with their names in the legend.
_USUAL: tuple[tuple[str, str, str, Mapping[str, str]], ...] = (
    (
        "Completion length",
        "tokens; healthy: stable, or growing together with the reward",
        "",
        {"completions/mean_length": "mean", "completions/max_length": "longest", "completions/min_length": "shortest"},
    ),
    (
        "Truncated completions",
        "share cut at the length limit; healthy: under 10%",
        "%",
        {"completions/clipped_ratio": "truncated"},
    ),
    (
        "Zero-variance groups",
        "share of groups whose rewards are all equal, which have no gradient; healthy: under 50%",
        "%",
        {"rollout/frac_reward_zero_std": "zero variance"},
    ),
    (
        "KL",
        f"from the reference policy, per token; healthy: a slow rise, without jumps; {_UPDATED}",
        "",
        {"policy/kl": "KL"},
    ),
    (
        "Entropy",
        f"of the policy, per token; healthy: a slow fall, not to 0; {_UPDATED}",
        "",
        {"policy/entropy": "entropy"},
    ),
    (
        "Clipped tokens",
        f"share of tokens whose ratio is clipped; healthy: under 10%; {_UPDATED}",
        "%",
        {"policy/clip_fraction": "clipped", "policy/clip_fraction_low": "below", "policy/clip_fraction_high": "above"},
    ),
    (
        "Gradient norm",
        f"before clipping; healthy: no growth over the run; {_UPDATED}",
        "",
        {"update/grad_norm": "gradient norm"},
    ),
    (
        "Learning rate",
        "of each step; healthy: as planned, the warm-up first",
        "",
        {"update/learning_rate": "learning rate"},
    ),
    (
        "Throughput",
        "tokens per second; healthy: steady, lower only as completions grow",
        "",
        {
            "perf/tokens_per_s": "whole step",
            "perf/rollout_tokens_per_s": "rollout",
            "perf/update_tokens_per_s": "update, prompts included",
        },
    ),
    (
        "Padding and shared tokens of the update",
        "share; healthy: little padding, and shared prompts near 1 − 1/group_size",
        "%",
        {
            "perf/padding_share": "padding",
            "perf/prompt_tokens_saved_share": "prompt tokens shared",
            "perf/completion_tokens_saved_share": "completion tokens shared",
        },
    ),
    ("Model FLOP utilization", "of the update, on CUDA; healthy: 20% to 50%", "%", {"perf/mfu": "MFU"}),
    (
        "Peak memory",
        "GiB of each process since its start; healthy: flat after the first steps",
        "",
        {"perf/gpu_memory_gib_max": "GPU", "perf/host_memory_gib_max": "host"},
    ),
    (
        "Tokens so far",
        "of the whole run; healthy: a straight line while lengths are stable",
        "",
        {"tokens/completion": "sampled", "tokens/prompt": "prompts"},
    ),
    (
        "Turns of an episode",
        "replies of the policy; healthy: no fall to 1 and no rise to max_turns without a higher reward",
        "",
        {"episode/turns_mean": "mean", "episode/turns_max": "longest"},
    ),
)


def curves(runs: Sequence[Run], groups: Mapping[str, Sequence[str]] | None = None) -> str:
    """Return the charts of a run as HTML, all over the same steps; empty without metrics.

    For several runs, return one chart for each curve, with a line for each run, or for each of ``groups``: see
    :func:`rlox_grpo.run.report.repeats.average`.
    """
    steps = [step for run in runs for step in (*run.metrics, *run.evaluations)]
    if not steps:
        return ""
    first, last = min(steps), max(steps)
    charts, more = {}, {}
    for run in runs:
        left = dict.fromkeys(
            key for row in run.metrics.values() for key in row if not key.startswith(("eval/", "guard/"))
        )
        charts[run.name] = [*_held_out(run.evaluations), *_training(run.metrics, left)]
        more[run.name] = [
            Chart(key, "", list(run.metrics), {key: column(run.metrics, key)}, from_zero=False)
            for key in [*left][:_MAX_MORE]
        ]
    note = (
        "Faint lines: every step. Bold lines: a running mean over a twentieth of the run. Legends give the last value, "
        "or the value under the pointer. Drag over a chart to zoom all of them in; double-click to zoom out. Click a "
        "name to hide its line."
    )
    usual, others = _draw_all(charts, first, last, groups), _draw_all(more, first, last, groups)
    count = others.count("<figure")
    return (
        f'<p class="quiet">{note}</p><noscript><p>The charts need JavaScript; the tables below do not.</p></noscript>'
        f'<div class="charts">{usual}</div>'
        + (
            f'<details><summary><h3>{count} more</h3></summary><div class="charts">{others}</div></details>'
            * bool(count)
        )
    )


def chart_evaluations(runs: Sequence[Run], groups: Mapping[str, Sequence[str]] | None = None) -> str:
    """Return the charts of the evaluation sets as HTML; for several runs as :func:`curves`. Empty without any."""
    charts = {run.name: chart_sets(run.evaluations) for run in runs}
    steps = [step for run in runs for step in run.evaluations]
    drawn = _draw_all(charts, min(steps), max(steps), groups) if steps else ""
    return f'<div class="charts">{drawn}</div>' if drawn else ""


def _draw_all(
    charts: Mapping[str, Sequence[Chart]], first: int, last: int, groups: Mapping[str, Sequence[str]] | None = None
) -> str:
    chosen = compare(charts) if len(charts) > 1 else next(iter(charts.values()))
    if groups is not None:
        chosen = [average(chart, groups) for chart in chosen]
    return "".join(draw(chart, first, last) for chart in chosen)


def _held_out(evaluations: Table) -> list[Chart]:
    def chart(title: str, note: str, wanted: Callable[[str], bool], unit: str = "") -> Chart:
        keys = dict.fromkeys(key for row in evaluations.values() for key in row if wanted(key))
        series = {key.replace("_", " "): column(evaluations, key) for key in keys}
        return Chart(title, note, list(evaluations), series, unit=unit, kind="dots")

    criteria = list_criteria(dict.fromkeys(key for row in evaluations.values() for key in row))
    is_accuracy_shown = any(shows_accuracy(row) or list_set_accuracies(row) for row in evaluations.values())
    charts = [
        chart(
            "Held-out accuracy",
            "share of right samples on prompts that are not trained on; healthy: rising with the training reward",
            lambda key: is_accuracy_shown and _is_accuracy(key),
            "%",
        ),
        chart(
            "Held-out reward",
            "mean of the weighted total; healthy: rising with the training reward",
            lambda key: _read_metric_name(key) == "mean_reward",
        ),
        Chart(
            "Held-out criteria of judges",
            "mean score of each criterion; healthy: none falls while others rise",
            list(evaluations),
            {name: column(evaluations, key) for key, name in criteria.items()},
            kind="dots",
        ),
    ]
    return [chart for chart in charts if chart.series]


def list_criteria(metrics: Iterable[str]) -> dict[str, str]:
    """Return the metrics that are criteria of judges, with their names: ``{"rewards/judge/clear": "judge: clear"}``.

    A judge is a reward with the metric ``cached``. In an evaluation of several sets, the name begins with the set:
    ``math, judge: clear``.
    """
    split = {key: tuple(match.groups()) for key in metrics if (match := _MEASURE.fullmatch(key))}
    judges = {(group, judge) for group, judge, measure in split.values() if measure == "cached"}
    return {
        key: f"{group.removesuffix('/')}, {judge}: {measure}" if group else f"{judge}: {measure}"
        for key, (group, judge, measure) in split.items()
        if (group, judge) in judges and measure not in NO_CRITERIA
    }


def _read_metric_name(key: str) -> str:
    """Return the metric of an evaluation without the name of its set; empty for that of a reward or an environment."""
    set_name, _, metric = key.rpartition("/")
    return "" if "/" in set_name or set_name in TAKEN else metric


def _is_accuracy(key: str) -> bool:
    """Whether a metric of an evaluation is a share of right samples, and not a limit of an interval or a difference."""
    metric = _read_metric_name(key)
    is_share = metric in ("accuracy", "greedy_accuracy") or metric.startswith(("pass@", "maj@"))
    return is_share and not metric.endswith(("_low", "_high"))


def _training(metrics: Table, left: dict[str, None]) -> list[Chart]:
    """Return the main charts, and remove their metrics from ``left``."""
    steps = list(metrics)

    def chart(title: str, note: str, unit: str, names: Mapping[str, str]) -> Chart:
        series = {name: column(metrics, key) for key, name in names.items() if key in left}
        for key in names:
            left.pop(key, None)
        return Chart(title, note, steps, series, unit, smooth=title != "Learning rate")

    def named(prefix: str, suffix: str) -> dict[str, str]:
        return {key: key[len(prefix) : -len(suffix)] for key in left if key.startswith(prefix) and key.endswith(suffix)}

    unscored = {
        key: key[len("rewards/") :].replace("/", ": ").replace("_", " ")
        for key in left
        if key.startswith("rewards/") and key.rpartition("/")[2] in _UNSCORED and any(column(metrics, key))
    }
    ends = {key: key.removeprefix("episode/stop/").replace("_", " ") for key in left if key.startswith("episode/stop/")}
    durations = named("rewards/", "/time_s")
    stages = {key: name for key, name in named("time/", "_s").items() if name != "step"}
    charts = [
        chart("Reward", "mean of the weighted total; healthy: rising", "", {"reward/mean": "reward"}),
        chart(
            "Reward components",
            "mean of each, before its weight; healthy: none falls while the reward rises",
            "",
            named("rewards/", "/mean"),
        ),
        chart(
            "Criteria of judges",
            "mean score of each criterion; healthy: none falls while others rise",
            "",
            list_criteria(left),
        ),
        chart(
            "Reward of each source",
            "mean of the weighted total; healthy: none falls while others rise",
            "",
            named("source/", "/reward"),
        ),
        chart(
            "Accuracy of each source",
            "share of right completions in training; healthy: rising",
            "%",
            named("source/", "/accuracy"),
        ),
        chart(
            "Unscored samples", "share that a reward could not read, decide or finish; healthy: near 0", "%", unscored
        ),
        *(chart(*usual) for usual in _USUAL),
        chart("Ends of episodes", "share by reason; healthy: few that ran out of turns or tokens", "%", ends),
        chart(
            "Time of each reward",
            "seconds of a step, within its rewards; healthy: short beside the rollout",
            "s",
            durations,
        ),
        Chart(
            "Time of a step",
            "seconds by stage, stacked; healthy: steady, mostly rollout and update",
            steps,
            {name: column(metrics, key) for key, name in stages.items()},
            "s",
            kind="stack",
        ),
    ]
    for key in (*stages, "time/step_s"):
        left.pop(key, None)
    return [chart for chart in charts if chart.series]
