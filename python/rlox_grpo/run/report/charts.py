"""Charts as HTML and inline SVG: lines over steps and stacked areas, drawn without any library.

The SVG holds only the shapes and stretches to its box; labels are HTML placed in per cent, so that text keeps its
size on a narrow screen. Matplotlib was the other way: 60 MB to install, and one fixed size and theme for each chart.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rlox_grpo.run.report.text import escape, number

Values = Sequence[float | None]

_MAX_POINTS = 600
_MAX_TABLE_ROWS = 40
_FEW_POINTS = 10


@dataclass(frozen=True)
class Chart:
    """One chart over the steps of a run.

    Attributes:
        title: What it shows.
        note: How to read it, in a few words.
        steps: Ascending.
        series: Name → one value for each step; None where there is none.
        unit: ``%`` for shares of 1; else put after each number.
        kind: ``line``; ``dots`` for a few measured points; ``stack`` for parts of a whole.
        smooth: Whether to draw a running mean over the values of a ``line``, which then fade.
        from_zero: Whether the axis starts at 0 when no value is below.
    """

    title: str
    note: str
    steps: Sequence[int]
    series: Mapping[str, Values]
    unit: str = ""
    kind: Literal["line", "dots", "stack"] = "line"
    smooth: bool = True
    from_zero: bool = True


def draw(chart: Chart, first: int, last: int) -> str:
    """HTML of one chart whose axis goes from step ``first`` to step ``last``."""
    if chart.kind == "stack":
        steps, series = _bucket_means(chart.steps, chart.series)
        tops = _running_totals(list(series.values()))
        ticks = _ticks(0.0, max((top for top in tops[-1]), default=1.0))
        shapes = _areas(steps, tops, _Axes(first, last, ticks[0], ticks[-1]))
    else:
        steps, series = chart.steps, chart.series
        finite = [value for values in series.values() for value in values if value is not None]
        low, high = min(finite, default=0.0), max(finite, default=1.0)
        ticks = _ticks(min(low, 0.0) if chart.from_zero else low, high)
        shapes = _lines(chart, _Axes(first, last, ticks[0], ticks[-1]))
    axes = _Axes(first, last, ticks[0], ticks[-1])
    grid = "".join(f'<path class="grid" d="M0 {axes.y(tick):.2f}H100"/>' for tick in ticks)
    labels = "".join(
        f'<span class="y" style="top:{axes.y(tick):.2f}%">{_tick(tick, chart.unit)}</span>' for tick in ticks
    ) + "".join(
        f'<span class="x" style="left:{axes.x(tick):.2f}%">{_step_tick(tick, first)}</span>'
        for tick in _step_ticks(first, last)
    )
    summary = escape(f"{chart.title} from step {first} to {last}. {_in_words(chart)}")
    return (
        f'<figure class="chart"><figcaption><h3>{escape(chart.title)}</h3><p class="quiet">{escape(chart.note)}</p>'
        f"{_legend(chart)}</figcaption>"
        f'<div class="plot" data-chart="{escape(_hover_data(chart, steps, series, first, last))}">'
        f'<svg viewBox="0 0 100 100" preserveAspectRatio="none" role="img" aria-label="{summary}">'
        f"{grid}{shapes}</svg>"
        f'<div class="labels" aria-hidden="true">{labels}</div></div>{_table(chart)}</figure>'
    )


@dataclass(frozen=True)
class _Axes:
    """From steps and values to per cent of the plot."""

    first: int
    last: int
    low: float
    high: float

    def x(self, step: float) -> float:
        return 100.0 * (step - self.first) / max(1, self.last - self.first)

    def y(self, value: float) -> float:
        return 100.0 - 100.0 * (value - self.low) / (self.high - self.low)


def _lines(chart: Chart, axes: _Axes) -> str:
    shapes = []
    for place, values in enumerate(chart.series.values()):
        smoothed = _running_mean(values) if chart.kind == "line" and chart.smooth else None
        line = f'<path class="line s{place % 8}{" raw" if smoothed else ""}" d="{_path(chart.steps, values, axes)}"/>'
        shapes.append(line)
        if smoothed:
            shapes.append(f'<path class="line s{place % 8}" d="{_path(chart.steps, smoothed, axes)}"/>')
        if chart.kind == "dots" or len(chart.steps) <= _FEW_POINTS:
            # A line of no length has round ends, which stay round when the box is stretched.
            points = "".join(
                f"M{axes.x(x):.2f} {axes.y(y):.2f}h0" for x, y in zip(chart.steps, values, strict=True) if y is not None
            )
            shapes.append(f'<path class="line dots s{place % 8}" d="{points}"/>')
    return "".join(shapes)


def _path(steps: Sequence[int], values: Values, axes: _Axes) -> str:
    """Draw a line through the points, broken where a value is missing; at most about ``_MAX_POINTS`` of them."""
    parts, move = [], True
    for place in _extremes(values):
        value = values[place]
        if value is None:
            move = True
            continue
        # A point between two gaps still shows, as the round end of a line of no length.
        parts.append(f"{'M' if move else 'L'}{axes.x(steps[place]):.2f} {axes.y(value):.2f}{'h0' if move else ''}")
        move = False
    return "".join(parts)


def _areas(steps: Sequence[int], tops: Sequence[Sequence[float]], axes: _Axes) -> str:
    shapes = []
    for place, top in enumerate(tops):
        bottom = tops[place - 1] if place else [0.0] * len(top)
        there = [f"{axes.x(step):.2f} {axes.y(value):.2f}" for step, value in zip(steps, top, strict=True)]
        back = [f"{axes.x(step):.2f} {axes.y(value):.2f}" for step, value in zip(steps, bottom, strict=True)][::-1]
        shapes.append(f'<path class="area s{place % 8}" d="M{"L".join(there + back)}Z"/>')
    return "".join(shapes)


def _extremes(values: Values) -> list[int]:
    """Places to draw: all of few, else the lowest, highest and missing of each bucket, so that no spike is lost."""
    if len(values) <= _MAX_POINTS:
        return list(range(len(values)))
    places: set[int] = {0, len(values) - 1}
    for bucket in _buckets(len(values), _MAX_POINTS // 2):
        known = [(value, place) for place in bucket if (value := values[place]) is not None]
        if known:
            places |= {min(known)[1], max(known)[1]}
        if len(known) < len(bucket):
            places.add(next(place for place in bucket if values[place] is None))
    return sorted(places)


def _bucket_means(steps: Sequence[int], series: Mapping[str, Values]) -> tuple[Sequence[int], Mapping[str, Values]]:
    """At most ``_MAX_POINTS`` steps, each the mean of its bucket; a part that a step does not have counts as 0."""
    buckets = _buckets(len(steps), min(len(steps), _MAX_POINTS))
    means = {
        name: [sum(values[place] or 0.0 for place in bucket) / len(bucket) for bucket in buckets]
        for name, values in series.items()
    }
    return [steps[bucket[len(bucket) // 2]] for bucket in buckets], means


def _buckets(length: int, count: int) -> list[range]:
    return [range(length * k // count, length * (k + 1) // count) for k in range(count)]


def _running_totals(series: Sequence[Values]) -> list[list[float]]:
    tops: list[list[float]] = []
    for values in series:
        below = tops[-1] if tops else [0.0] * len(values)
        tops.append([base + (value or 0.0) for base, value in zip(below, values, strict=True)])
    return tops


def _running_mean(values: Values) -> list[float | None] | None:
    """Mean over a window of about a twentieth of the run, centred; None for a run too short to need one."""
    reach = len(values) // 40
    if reach < 1:
        return None
    totals, counts = [0.0], [0]
    for value in values:
        totals.append(totals[-1] + (value or 0.0))
        counts.append(counts[-1] + (value is not None))
    means: list[float | None] = []
    for place, value in enumerate(values):
        start, end = max(0, place - reach), min(len(values), place + reach + 1)
        count = counts[end] - counts[start]
        means.append((totals[end] - totals[start]) / count if value is not None else None)
    return means


def _ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round values, about as many as asked, that span ``low`` to ``high``."""
    if not high - low > 1e-7 * max(abs(low), abs(high)):  # a constant, but for rounding
        pad = abs(low) / 2 or 1.0
        low, high = (low - pad if low < 0 else 0.0), (high + pad if high >= 0 else 0.0)
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(m for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    start, end = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [tick * step for tick in range(start, end + 1)]


def _step_ticks(first: int, last: int) -> list[int]:
    round_steps = [round(tick) for tick in _ticks(first, last, about=7) if tick.is_integer() and first < tick <= last]
    return [first, *(tick for tick in round_steps if tick - first > (last - first) / 12)]


def _step_tick(step: int, first: int) -> str:
    return f"step {step:,}" if step == first else f"{step:,}"


def _tick(value: float, unit: str) -> str:
    return f"{100 * value:.3g}%" if unit == "%" else number(value, unit)


def _last(values: Values) -> float | None:
    return next((value for value in reversed(values) if value is not None), None)


def _in_words(chart: Chart) -> str:
    ends = []
    for name, values in chart.series.items():
        known = [value for value in values if value is not None]
        if known:
            ends.append(f"{name}: first {number(known[0], chart.unit)}, last {number(known[-1], chart.unit)}")
    return "; ".join(ends)


def _legend(chart: Chart) -> str:
    rows = "".join(
        f'<li><i class="swatch s{place % 8}"></i><bdi>{escape(name)}</bdi> '
        f"<b>{number(_last(values), chart.unit)}</b></li>"
        for place, (name, values) in enumerate(chart.series.items())
    )
    return f'<ul class="legend" aria-label="Last values">{rows}</ul>'


def _hover_data(chart: Chart, steps: Sequence[int], series: Mapping[str, Values], first: int, last: int) -> str:
    """Return what the page's script shows under the pointer: JSON of the points, thinned as they are drawn."""
    places = sorted(set().union(*(_extremes(values) for values in series.values())))
    data = {
        "first": first,
        "last": last,
        "unit": chart.unit,
        "steps": [steps[place] for place in places],
        "series": [
            {"name": name, "values": [_rounded(values[place]) for place in places]} for name, values in series.items()
        ],
    }
    return json.dumps(data, separators=(",", ":"))


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def _table(chart: Chart) -> str:
    """Write out the numbers behind a chart, for those who cannot see it or want to copy them."""
    count = len(chart.steps)
    places = sorted({round(k * (count - 1) / max(1, min(count, _MAX_TABLE_ROWS) - 1)) for k in range(_MAX_TABLE_ROWS)})
    places = [place for place in places if place < count]
    title = f"Numbers: {len(places)} of {count:,} steps" if len(places) < count else "Numbers"
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in chart.series)
    body = "".join(
        f'<tr><th scope="row">{chart.steps[place]:,}</th>'
        + "".join(f"<td>{number(values[place], chart.unit)}</td>" for values in chart.series.values())
        + "</tr>"
        for place in places
    )
    return (
        f'<details class="numbers"><summary>{title}</summary><div class="scroll" tabindex="0"><table>'
        f'<caption class="hidden">{escape(chart.title)}</caption>'
        f'<thead><tr><th scope="col">step</th>{head}</tr></thead><tbody>{body}</tbody></table></div></details>'
    )
