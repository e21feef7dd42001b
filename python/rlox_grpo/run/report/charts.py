"""One chart of a report: title, legend and table as HTML, and the points as JSON, which uPlot draws.

uPlot (MIT; the package ``uplot-python`` brings its files) is written into each page, so the page needs no network.
Measured on a run of 800 steps with 34 curves, the page's size and the CPU time to write it:

=================== ======== ======
uPlot               0.3 MB   0.04 s
matplotlib, as SVG  0.6 MB   3.1 s
bokeh               1.8 MB   2.2 s
altair              2.5 MB   8.8 s
plotly              5.4 MB   0.7 s
pygal               7.6 MB   2.9 s
=================== ======== ======

bokeh, altair and plotly evaluate strings as code, which the page's content security policy forbids. matplotlib and
pygal show no values under the pointer without further scripts, and cannot zoom.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rlox_grpo.run.report.text import breakable, escape, number, visible

Values = Sequence[float | None]
_Floats = NDArray[np.float64]

_MAX_POINTS = 1200
_MAX_TABLE_ROWS = 40
_COLORS = 8
_LARGEST = 1e30
"""Larger values are drawn here: their sums and differences would overflow in the browser."""


@dataclass(frozen=True)
class Chart:
    """One chart over the steps of a run.

    Attributes:
        steps: Steps in ascending order.
        series: Name → one value for each step, or None.
        unit: ``%`` shows a share of 1 as a percentage; any other unit is written after each number.
        kind: ``line``, ``dots`` for few points, or ``stack`` for parts of a whole.
        smooth: Whether a ``line`` is drawn faintly, with its running mean on top.
        from_zero: Whether the axis starts at 0 if no value is negative.
        spans_gaps: Whether a line connects the points on both sides of missing values.
        limits: Name of a series → the lower and the upper limit of its confidence interval at each step, or None. The
            area between them is drawn as a band behind the line.
    """

    title: str
    note: str
    steps: Sequence[int]
    series: Mapping[str, Values]
    unit: str = ""
    kind: Literal["line", "dots", "stack"] = "line"
    smooth: bool = True
    from_zero: bool = True
    spans_gaps: bool = False
    limits: Mapping[str, tuple[Values, Values]] = field(default_factory=dict)


def draw(chart: Chart, first: int, last: int) -> str:
    """Return the HTML of one chart whose axis goes from step ``first`` to step ``last``."""
    label = escape(f"{chart.title} from step {first} to {last}. {_in_words(chart)}")
    return (
        f'<figure class="chart"><figcaption><h3>{breakable(chart.title)}</h3><p class="quiet">{escape(chart.note)}</p>'
        f"{_legend(chart)}</figcaption>"
        f'<div class="plot" role="img" aria-label="{label}" data-chart="{escape(_points(chart, first, last))}"></div>'
        f"{_table(chart)}</figure>"
    )


def compare(charts: Mapping[str, Sequence[Chart]]) -> list[Chart]:
    """Merge the charts of several runs: one chart for each curve, with a line for each run that has it."""
    merged: dict[tuple[str, str], dict[str, Chart]] = {}
    for run, run_charts in charts.items():
        for chart in run_charts:
            for name in chart.series:
                merged.setdefault((chart.title, name), {})[run] = chart
    together, names = [], Counter(title for title, _ in merged)
    for (title, name), by_run in merged.items():
        chart = next(iter(by_run.values()))
        steps = sorted(set().union(*(other.steps for other in by_run.values())))
        series = {run: _at(steps, other.steps, other.series[name]) for run, other in by_run.items()}
        limits = {}
        for run, other in by_run.items():
            if name in other.limits:
                low, high = other.limits[name]
                limits[run] = (_at(steps, other.steps, low), _at(steps, other.steps, high))
        together.append(
            replace(
                chart,
                title=title if names[title] == 1 else f"{title}: {name}",
                steps=steps,
                series=series,
                kind="dots" if chart.kind == "dots" else "line",
                spans_gaps=True,
                limits=limits,
            )
        )
    return together


def _at(steps: Sequence[int], measured_steps: Sequence[int], values: Values) -> list[float | None]:
    """Return the values at ``steps``, None at those that are not in ``measured_steps``."""
    by_step = dict(zip(measured_steps, values, strict=True))
    return [by_step.get(step) for step in steps]


def _points(chart: Chart, first: int, last: int) -> str:
    """Return the data of a chart as JSON: about ``_MAX_POINTS`` points and their running means."""
    values = np.array(list(chart.series.values()), np.float64).clip(-_LARGEST, _LARGEST)  # [S, T]; None is NaN
    drawn = _thin(values)
    means = _running_means(values) if chart.kind == "line" and chart.smooth else None
    limits = {  # [2, T] each: the lower and the upper limits
        name: np.array(ends, np.float64).clip(-_LARGEST, _LARGEST) for name, ends in chart.limits.items()
    }
    series = [
        {
            "name": visible(name),
            "values": _rounded(curve[drawn]),
            **({} if means is None else {"means": _rounded(means[row][drawn])}),
            **({end: _rounded(limits[name][k][drawn]) for k, end in enumerate(("low", "high")) if name in limits}),
        }
        for row, (name, curve) in enumerate(zip(chart.series, values, strict=True))
    ]
    data = {
        "first": first,
        "last": last,
        "unit": chart.unit,
        "kind": chart.kind,
        "fromZero": chart.from_zero,
        "spansGaps": chart.spans_gaps or chart.kind == "dots",
        "steps": [chart.steps[step] for step in drawn],
        "series": series,
    }
    return json.dumps(data, separators=(",", ":"))


def _thin(values: _Floats) -> list[int]:
    """Return the steps of ``values [S, T]`` to draw: all, or the extremes and gaps in each bucket of steps."""
    num_series, num_steps = values.shape
    if num_steps <= _MAX_POINTS:
        return list(range(num_steps))
    # Each bucket keeps two points (lowest and highest) of each series, so that peaks stay visible.
    num_buckets = max(1, _MAX_POINTS // (2 * num_series))
    steps = {0, num_steps - 1}
    for start, stop in pairwise(np.linspace(0, num_steps, num_buckets + 1).astype(int).tolist()):
        bucket = values[:, start:stop]
        missing = np.isnan(bucket)
        lowest, highest = np.where(missing, np.inf, bucket).argmin(1), np.where(missing, -np.inf, bucket).argmax(1)
        gaps = missing.argmax(1)[missing.any(1)]
        steps.update(start + int(step) for step in (*lowest, *highest, *gaps))
    return sorted(steps)


def _running_means(values: _Floats) -> _Floats | None:
    """Return centred means of ``values [S, T]`` over about a twentieth of the steps; None for fewer than 40 steps."""
    num_steps = values.shape[1]
    reach = num_steps // 40
    if reach < 1:
        return None
    is_number = ~np.isnan(values)
    start = np.maximum(np.arange(num_steps) - reach, 0)
    stop = np.minimum(np.arange(num_steps) + reach + 1, num_steps)
    # Means of all windows by differences of cumulative sums. NaN adds 0 to the sum and to the count.
    totals, counts = (
        np.pad(array, ((0, 0), (1, 0))).cumsum(1)
        for array in (np.where(is_number, values, 0.0), is_number.astype(np.float64))
    )
    means = (totals[:, stop] - totals[:, start]) / np.maximum(counts[:, stop] - counts[:, start], 1.0)
    return np.where(is_number, means, np.nan)


def _rounded(values: _Floats) -> list[float | None]:
    return [None if np.isnan(value) else float(f"{value:.5g}") for value in values]


def _in_words(chart: Chart) -> str:
    ends = []
    for name, values in chart.series.items():
        numbers = [value for value in values if value is not None]
        if numbers:
            ends.append(f"{name}: first {number(numbers[0], chart.unit)}, last {number(numbers[-1], chart.unit)}")
    return "; ".join(ends)


def _legend(chart: Chart) -> str:
    """List the curves with their last values. The script shows the values under the pointer instead."""
    rows = ""
    for index, (name, values) in enumerate(chart.series.items()):
        last = next((value for value in reversed(values) if value is not None), None)
        rows += (
            f'<li><button type="button" aria-pressed="true"><i class="swatch s{index % _COLORS}"></i>'
            f"<bdi>{escape(name)}</bdi> <b>{number(last, chart.unit)}</b></button></li>"
        )
    return f'<ul class="legend" aria-label="Last values">{rows}<li class="at quiet"></li></ul>'


def _table(chart: Chart) -> str:
    """Return the numbers of a chart as a table, for screen readers and for copying."""
    count = len(chart.steps)
    steps = np.unique(np.linspace(0, count - 1, min(count, _MAX_TABLE_ROWS)).round().astype(int)).tolist()
    title = f"Numbers: {len(steps)} of {count:,} steps" if len(steps) < count else "Numbers"
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in chart.series)
    body = "".join(
        f'<tr><th scope="row">{chart.steps[step]:,}</th>'
        + "".join(f"<td>{_write_cell(chart, name, step)}</td>" for name in chart.series)
        + "</tr>"
        for step in steps
    )
    return (
        f'<details class="numbers"><summary>{title}</summary><div class="scroll" tabindex="0"><table>'
        f'<caption class="hidden">{escape(chart.title)}</caption>'
        f'<thead><tr><th scope="col">step</th>{head}</tr></thead><tbody>{body}</tbody></table></div></details>'
    )


def _write_cell(chart: Chart, name: str, step: int) -> str:
    """Write a value, and the limits of its interval in brackets: ``41.2% [35.0%, 47.7%]``."""
    value = chart.series[name][step]
    ends = [each[step] for each in chart.limits.get(name, ())]
    written = [number(each, chart.unit) for each in (value, *ends)]
    return written[0] if not ends or None in (value, *ends) else f"{written[0]} [{written[1]}, {written[2]}]"
