"""The accuracy of each evaluation set in a report, and the differences over a run or between runs, with intervals."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from rlox_grpo.config.eval_set import TAKEN
from rlox_grpo.run.console import list_set_accuracies, shows_accuracy
from rlox_grpo.run.eval_history import compare_shares
from rlox_grpo.run.report.charts import Chart
from rlox_grpo.run.report.read import Run, Table, column, read_metric
from rlox_grpo.run.report.samples import read_verdicts
from rlox_grpo.run.report.text import escape

_SET = re.compile(r"(?:([^/]+)/)?(?:accuracy|mean_reward)")
_AT_K = re.compile(r"(?:pass|maj)@[0-9]+")
_BAND = "band: 95% confidence interval over the prompts"

COLUMNS = ("first evaluation", "last evaluation", "difference to the first", "difference to the best before")


def list_accuracies(evaluations: Table) -> list[tuple[str, list[str]]]:
    """Return a row of a table for each set with two evaluations: its name, and a cell of HTML for each of `COLUMNS`.

    Brackets hold the ends of 95 % confidence intervals over the prompts. The differences are paired by prompt.
    """
    sets = list_set_accuracies(dict.fromkeys(name for row in evaluations.values() for name in row))
    if any(shows_accuracy(row) for row in evaluations.values()):
        sets = {"accuracy": "accuracy", **sets}
    rows = []
    for name, key in sets.items():
        measured = [step for step, _ in read_metric(evaluations, key)]
        if len(measured) > 1:
            cells = [f"{_write(evaluations, step, key)}, step {step:,}" for step in (measured[0], measured[-1])]
            cells += [_write(evaluations, measured[-1], f"{key}_vs_{which}", sign="+") for which in ("start", "best")]
            rows.append((name, cells))
    return rows


def chart_sets(evaluations: Table) -> list[Chart]:
    """Return the charts of each set: its accuracy, pass@k and maj@k, and the accuracy's difference to the start.

    A set whose first reward is graded has a chart of its mean reward instead. The bands are 95 % confidence intervals.
    """
    names = dict.fromkeys(key for row in evaluations.values() for key in row)
    set_names = dict.fromkeys(match[1] or "" for name in names if (match := _SET.fullmatch(name)))
    charts = []
    for set_name in (name for name in set_names if name not in TAKEN):
        rows = _select(evaluations, set_name)
        keys = dict.fromkeys(key for row in rows.values() for key in row)
        shares = [key for key in keys if key in ("accuracy", "greedy_accuracy") or _AT_K.fullmatch(key)]
        if any(shows_accuracy(row) for row in rows.values()):
            charts.append(_chart_metrics(_title(set_name, "accuracy"), _BAND, rows, shares, unit="%"))
            note = f"of the accuracy, paired by prompt; {_BAND}"
            charts.append(
                _chart_metrics(_title(set_name, "difference to the start"), note, rows, ["accuracy_vs_start"], "%")
            )
        else:
            charts.append(_chart_metrics(_title(set_name, "mean reward"), _BAND, rows, ["mean_reward"]))
    return [chart for chart in charts if chart.series]


def _select(evaluations: Table, set_name: str) -> Table:
    """Return the metrics of a set, without its name; those of the set without a name if it is empty."""
    prefix = f"{set_name}/" if set_name else ""
    return {
        step: {key.removeprefix(prefix): value for key, value in row.items() if key.startswith(prefix)}
        for step, row in evaluations.items()
    }


def _title(set_name: str, metric: str) -> str:
    return f"{set_name}: {metric}" if set_name else metric.capitalize()


def _chart_metrics(title: str, note: str, rows: Table, keys: Sequence[str], unit: str = "") -> Chart:
    columns = {key: column(rows, key) for key in keys if any(row.get(key) is not None for row in rows.values())}
    ends = {key: (column(rows, f"{key}_low"), column(rows, f"{key}_high")) for key in columns}
    return Chart(
        title,
        note,
        list(rows),
        {key.replace("_", " "): values for key, values in columns.items()},
        unit,
        kind="dots",
        limits={key.replace("_", " "): limits for key, limits in ends.items() if any(x is not None for x in limits[0])},
    )


def _write(evaluations: Table, step: int, key: str, sign: str = "") -> str:
    """Write ``0.281 [0.19, 0.39]``; a dash if it was not measured."""
    numbers = [evaluations[step].get(f"{key}{end}") for end in ("", "_low", "_high")]
    value, *limits = (f"{each:{sign}.3f}" if isinstance(each, (int, float)) else None for each in numbers)
    if value is None:
        return escape("—")
    return value if None in limits else f"{value} [{limits[0]}, {limits[1]}]"


def compare_runs(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Return a row of a table for each set that all runs evaluated: its name, and a cell of HTML for each run.

    A cell has the accuracy over the logged prompts of the last evaluation. From the second run on, it also has the
    difference to the first run, paired over the prompts that both have logged, with its 95 % confidence interval.
    """
    rows = []
    for name in (name for name in runs[0].held_out if all(run.held_out.get(name) for run in runs)):
        cells = list[str]()
        steps = [max(run.held_out[name]) for run in runs]
        all_verdicts = read_verdicts([run.held_out[name][step] for run, step in zip(runs, steps, strict=True)])
        first = all_verdicts[0]
        for number, (step, verdicts) in enumerate(zip(steps, all_verdicts, strict=True)):
            shares = [np.mean(right) for right in verdicts.values()]
            cell = f"{np.mean(shares):.3f}, step {step:,}" if shares else escape("—")
            common = [prompt for prompt in first if prompt in verdicts]
            if number > 0 and common:
                before, after = ([np.mean(each[prompt]) for prompt in common] for each in (first, verdicts))
                samples = min(len(each[prompt]) for each in (first, verdicts) for prompt in common)
                change = compare_shares("change", before, after, samples)
                value, low, high = (change.get(f"change{end}", float("nan")) for end in ("", "_low", "_high"))
                cell += f"; {value:+.3f} [{low:+.3f}, {high:+.3f}] over {len(common):,} prompts"
            cells.append(cell)
        rows.append((name or "evaluation", cells))
    return rows
