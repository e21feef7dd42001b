"""Which curves a run has: those that everybody looks at in their order, then one for each metric that is left."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rlox_grpo.rewards import OUTCOMES, STATUSES
from rlox_grpo.run.report.charts import Chart, draw
from rlox_grpo.run.report.read import Run, Table, column

_UNSCORED = (*STATUSES[1:], *OUTCOMES[1:])


def curves(run: Run) -> str:
    """Every chart of a run as HTML, all over the same steps; empty when nothing was recorded."""
    steps = [*run.metrics, *run.evaluations]
    if not steps:
        return ""
    first, last = min(steps), max(steps)
    left = dict.fromkeys(key for row in run.metrics.values() for key in row if not key.startswith("eval/"))
    charts = [*_held_out(run.evaluations), *_training(run.metrics, left)]
    note = (
        "Faint lines: every step. Bold lines: a running mean over a twentieth of the run. Legends give the last value."
    )
    body = (
        f'<p class="quiet">{note}</p><div class="charts">{"".join(draw(chart, first, last) for chart in charts)}</div>'
        if charts
        else ""
    )
    more = [Chart(key, "", list(run.metrics), {key: column(run.metrics, key)}, from_zero=False) for key in left]
    if more:
        drawn = "".join(draw(chart, first, last) for chart in more)
        body += f'<details><summary><h3>{len(more)} more</h3></summary><div class="charts">{drawn}</div></details>'
    return body


def _held_out(evaluations: Table) -> list[Chart]:
    def chart(title: str, note: str, wanted: Callable[[str], bool], unit: str = "") -> Chart:
        keys = dict.fromkeys(key for row in evaluations.values() for key in row if wanted(key))
        series = {key.replace("_", " "): column(evaluations, key) for key in keys}
        return Chart(title, note, list(evaluations), series, unit=unit, kind="dots")

    charts = [
        chart(
            "Held-out accuracy",
            "on problems that training never sees",
            lambda key: "accuracy" in key or key.startswith("pass@"),
            "%",
        ),
        chart("Held-out reward", "mean of the weighted total", lambda key: key == "mean_reward"),
    ]
    return [chart for chart in charts if chart.series]


def _training(metrics: Table, left: dict[str, None]) -> list[Chart]:
    """Make the known charts, and take the metrics that they show out of ``left``."""
    steps = list(metrics)

    def chart(title: str, note: str, names: Mapping[str, str], unit: str = "", *, smooth: bool = True) -> Chart:
        series = {name: column(metrics, key) for key, name in names.items() if key in left}
        for key in names:
            left.pop(key, None)
        return Chart(title, note, steps, series, unit, smooth=smooth)

    components = {
        key: key[len("rewards/") : -len("/mean")]
        for key in left
        if key.startswith("rewards/") and key.endswith("/mean")
    }
    unscored = {
        key: key[len("rewards/") :].replace("/", ": ").replace("_", " ")
        for key in left
        if key.startswith("rewards/") and key.rpartition("/")[2] in _UNSCORED and any(column(metrics, key))
    }
    durations = {
        key: key[len("rewards/") : -len("/time_s")]
        for key in left
        if key.startswith("rewards/") and key.endswith("/time_s")
    }
    stages = {
        key: key[len("time/") :].removesuffix("_s") for key in left if key.startswith("time/") and key != "time/step_s"
    }
    lengths = {
        "completions/mean_length": "mean",
        "completions/max_length": "longest",
        "completions/min_length": "shortest",
    }
    clipped = {
        "policy/clip_fraction": "clipped",
        "policy/clip_fraction_low": "below",
        "policy/clip_fraction_high": "above",
    }
    throughput = {
        "perf/tokens_per_s": "whole step",
        "perf/rollout_tokens_per_s": "rollout",
        "perf/update_tokens_per_s": "update, prompts included",
    }
    spared = {
        "perf/padding_share": "places that are padding",
        "perf/prompt_tokens_saved_share": "prompt tokens shared",
        "perf/completion_tokens_saved_share": "completion tokens shared",
    }
    charts = [
        chart("Reward", "mean of the weighted total", {"reward/mean": "reward"}),
        chart("Reward components", "mean of each, before its weight", components),
        chart("Unscored samples", "share that a reward could not read, decide or finish", unscored, "%"),
        chart("Completion length", "tokens", lengths),
        chart(
            "Truncated completions", "share cut at the length limit", {"completions/clipped_ratio": "truncated"}, "%"
        ),
        chart(
            "Zero-variance groups",
            "share whose rewards are all equal: they teach nothing",
            {"rollout/frac_reward_zero_std": "zero variance"},
            "%",
        ),
        chart("KL", "from the reference policy, per token", {"policy/kl": "KL"}),
        chart("Entropy", "of the policy, per token", {"policy/entropy": "entropy"}),
        chart("Clipped tokens", "share whose ratio leaves the clip range", clipped, "%"),
        chart("Gradient norm", "before clipping", {"update/grad_norm": "gradient norm"}),
        chart("Learning rate", "as used", {"update/learning_rate": "learning rate"}, smooth=False),
        chart("Throughput", "tokens per second", throughput),
        chart("What the update forwards", "share", spared, "%"),
        chart("Model FLOP utilisation", "of the update, on CUDA", {"perf/mfu": "MFU"}, "%"),
        chart("Time of each reward", "seconds of a step, within its rewards", durations, "s"),
        _stacked(metrics, stages),
    ]
    for key in (*stages, "time/step_s"):
        left.pop(key, None)
    return [chart for chart in charts if chart.series]


def _stacked(metrics: Table, stages: Mapping[str, str]) -> Chart:
    series = {name: column(metrics, key) for key, name in stages.items()}
    return Chart("Time of a step", "seconds by stage, stacked", list(metrics), series, "s", kind="stack")
