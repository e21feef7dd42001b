"""Live display of a run in a notebook: a progress bar, the main metrics and their curves, updated in place."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rich.console import Console

from rlox_grpo.run.console import LatestMetrics
from rlox_grpo.run.report.text import escape, number

Publish = Callable[[Mapping[str, str]], None]
"""Show a display of the given MIME types, or replace the one shown before."""

Points = list[tuple[int, float]]
"""Step and value."""

# Title, metric of each step (a line), metric of each evaluation (dots).
_CURVES = (
    ("reward (dots: held-out)", "reward/mean", "eval/mean_reward"),
    ("zero-variance groups", "rollout/frac_reward_zero_std", None),
    ("completion length, tokens", "completions/mean_length", None),
    ("KL from the reference", "policy/kl", None),
    ("KL from the teacher", "teacher/kl", None),
    ("entropy", "policy/entropy", None),
    ("turns of an episode", "episode/turns_mean", None),
)

_REFRESH_S = 0.5
"""Seconds between two updates: more would slow the browser down."""

_MAX_POINTS = 200
"""Points of a curve, about one for each pixel of its width."""

_WIDTH, _HEIGHT, _MARGIN = 220, 72, 3
"""Size of a curve, in CSS pixels."""


class NotebookSink:
    """A display that each step updates: progress bar, metrics and curves as SVG, which every notebook can show."""

    def __init__(
        self,
        total_steps: int | None = None,
        *,
        resume_step: int = 0,
        earlier: Iterable[tuple[int, Mapping[str, Any]]] = (),
        publish: Publish | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Show the display in the output of the running cell, by ``publish`` if it is given, otherwise by IPython.

        ``earlier`` has the metrics of the steps up to ``resume_step``, for the curves; a value may be None. The other
        arguments are as in :class:`rlox_grpo.run.console.ConsoleSink`.
        """
        self._latest = LatestMetrics(total_steps, resume_step=resume_step)
        self._points: dict[str, Points] = {}
        self._publish = publish or _make_publisher()
        self._now, self._shown_at = now, -math.inf
        self._doing = ""
        for step, metrics in earlier:
            self._keep(step, metrics)
        self._show()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show one step."""
        self._latest.take(step, metrics)
        self._keep(step, metrics)
        self._doing = ""
        self._show_if_due()

    def show_episodes(self, ended: int, total: int) -> None:
        """Show how many episodes of the current rollout have ended."""
        self._doing = f"{ended} of {total} episodes ended"
        self._show_if_due()

    def close(self) -> None:
        """Show the last state."""
        self._show()

    def _keep(self, step: int, metrics: Mapping[str, Any]) -> None:
        for key in (key for _, *keys in _CURVES for key in keys if key is not None):
            value = metrics.get(key)
            if isinstance(value, (int, float)) and math.isfinite(value):
                self._points.setdefault(key, []).append((step, float(value)))

    def _show_if_due(self) -> None:
        if self._now() - self._shown_at >= _REFRESH_S:
            self._show()

    def _show(self) -> None:
        self._shown_at = self._now()
        latest = self._latest
        numbers = [*latest.numbers(), *([self._doing] if self._doing else [])]
        share = "" if latest.total is None else f' value="{latest.step}" max="{latest.total}"'
        curves = "".join(
            draw_curve(title, self._points.get(key, []), self._points.get(dots or "", []))
            for title, key, dots in _CURVES
        )
        page = (
            f'<div><b>{escape(latest.head())}</b> <progress{share} style="width: 40%"></progress><br>'
            f"<small>{escape('  '.join(numbers))}</small>"
            f'<div style="display: flex; flex-wrap: wrap; gap: 12px">{curves}</div></div>'
        )
        self._publish({"text/html": page, "text/plain": "  ".join([latest.head(), *numbers])})


def is_notebook() -> bool:
    """Whether this process is the kernel of a notebook, as rich finds it: Jupyter, Colab or Databricks."""
    return Console().is_jupyter


def draw_curve(title: str, line: Points, dots: Points) -> str:
    """Return a small SVG chart, with the range of its values in the caption; empty without points."""
    points = [*line, *dots]
    if not points:
        return ""
    first, last = (choose(step for step, _ in points) for choose in (min, max))
    low, high = (choose(value for _, value in points) for choose in (min, max))

    def locate(step: int, value: float) -> str:
        x = 0.5 if last == first else (step - first) / (last - first)
        # Halves: the difference of two large finite numbers may be infinite.
        y = 0.5 if high == low else (value / 2 - low / 2) / (high / 2 - low / 2)
        return f"{_MARGIN + x * (_WIDTH - 2 * _MARGIN):.1f},{_HEIGHT - _MARGIN - y * (_HEIGHT - 2 * _MARGIN):.1f}"

    marks = [locate(*point).split(",") for point in (dots if len(line) != 1 else points)]
    circles = "".join(f'<circle cx="{x}" cy="{y}" r="2.5" fill="currentColor"/>' for x, y in marks)
    path = " ".join(locate(*point) for point in thin(line))
    newest = number((line or dots)[-1][1])
    caption = f"{escape(title)}: <b>{newest}</b>, {number(low)} to {number(high)}"
    return (
        f'<figure style="margin: 4px 0">'
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="{escape(title)}">'
        f'<polyline points="{path}" fill="none" stroke="currentColor" stroke-width="1.5"/>{circles}</svg>'
        f"<figcaption><small>{caption}</small></figcaption></figure>"
    )


def thin(line: Points, most: int = _MAX_POINTS) -> Points:
    """Return at most ``most`` points: neighbouring points become one, at their last step and with their mean value."""
    width = math.ceil(len(line) / most)
    if width <= 1:
        return line
    chunks = [line[start : start + width] for start in range(0, len(line), width)]
    return [(chunk[-1][0], sum(value / len(chunk) for _, value in chunk)) for chunk in chunks]


def _make_publisher() -> Publish:
    """Return a function that shows a new display in the running cell when first called, and then replaces it."""
    from uuid import uuid4

    from IPython.display import display

    name, shown = uuid4().hex, False

    def publish(page: Mapping[str, str]) -> None:
        nonlocal shown
        display(dict(page), raw=True, display_id=name, update=shown)  # type: ignore[no-untyped-call]
        shown = True

    return publish
