"""Means over runs that repeat one another, such as runs with several seeds."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from rlox_grpo.run.report.charts import Chart
from rlox_grpo.run.report.read import Run, read_metric
from rlox_grpo.run.report.text import number

_NUMBER_AT_END = re.compile(r"[-_.]*\d+$")

COLUMNS = ("runs", "reward, last 10%", "last held-out reward", "last held-out accuracy")


def group_repeats(names: Sequence[str]) -> dict[str, list[str]]:
    """Group the names of runs that differ only in the number at their end: ``{"mine": ["mine_0", "mine_1"]}``."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_NUMBER_AT_END.sub("", name) or name, []).append(name)
    return groups


def average(chart: Chart, groups: Mapping[str, Sequence[str]]) -> Chart:
    """Return a chart with a line for each group: the mean of its runs, and a band from the lowest to the highest.

    A step at which a run of the group has no value has no mean.
    """
    series, limits = {}, {}
    for group, names in groups.items():
        members = [chart.series[name] for name in names if name in chart.series]
        if not members:
            continue
        values = np.array(members, np.float64)  # [R, T]; None is NaN
        title = group if len(members) == 1 else f"{group}, mean of {len(members)}"
        series[title], low, high = (_to_list(each) for each in (values.mean(0), values.min(0), values.max(0)))
        if len(members) > 1:
            limits[title] = (low, high)
    note = f"{chart.note}; mean of the runs, and their range"
    return replace(chart, note=note, series=series, limits=limits, smooth=chart.smooth and not limits)


def summarize_repeats(runs: Sequence[Run], groups: Mapping[str, Sequence[str]]) -> list[tuple[str, list[str]]]:
    """Return the rows of a table with :data:`COLUMNS`: means over the runs of each group, with their ranges."""
    by_name = {run.name: run for run in runs}
    rows = []
    for group, names in groups.items():
        members = [by_name[name] for name in names]
        rewards = [[value for _, value in read_metric(run.metrics, "reward/mean")] for run in members]
        last = [float(np.mean(values[-max(1, len(values) // 10) :])) if values else None for values in rewards]
        held_out = [[_last(run, metric) for run in members] for metric in ("mean_reward", "accuracy")]
        rows.append((group, [str(len(members)), *map(_write_range, (last, *held_out))]))
    return rows


def _last(run: Run, metric: str) -> float | None:
    measured = read_metric(run.evaluations, metric)
    return measured[-1][1] if measured else None


def _write_range(values: Sequence[float | None]) -> str:
    """Return ``mean [lowest, highest]``; a dash if a run has no value."""
    numbers = [value for value in values if value is not None]
    if len(numbers) < len(values):
        return number(None)
    mean, low, high = (number(float(each)) for each in (np.mean(numbers), min(numbers), max(numbers)))
    return mean if len(numbers) == 1 else f"{mean} [{low}, {high}]"


def _to_list(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> list[float | None]:
    return [None if np.isnan(value) else float(value) for value in values]
