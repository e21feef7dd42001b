"""Detect that a judge's score rises while a rule on held-out prompts falls: the policy learns to please the judge."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_JUDGE = re.compile(r"rewards/([^/]+)/cached")
_HELD_OUT = re.compile(r"eval/(?:[^/]+/)?rewards/([^/]+)")

LEAST_CHANGE = 0.05
"""Least amount by which the judge's mean must have risen, and the rule's mean must have fallen."""

_WINDOW = 5


def find_drift(steps: Sequence[Mapping[str, float]]) -> tuple[str, str, float, float] | None:
    """Return the judge, the metric of the rule, and its first and last value; None if no judge drifts from a rule.

    The judge's mean over the last steps is compared with its mean over the first steps. The last two evaluations must
    be below the first, so that noise in a single evaluation does not count as drift.

    Args:
        steps: the metrics of steps, oldest first. Only some have metrics of an evaluation.
    """
    names = {name: None for step in steps for name in step}
    judges = [match[1] for name in names if (match := _JUDGE.fullmatch(name))]
    for judge in judges:
        scores = [step[f"rewards/{judge}/mean"] for step in steps if f"rewards/{judge}/mean" in step]
        if len(scores) < 2 * _WINDOW or _average(scores[-_WINDOW:]) < _average(scores[:_WINDOW]) + LEAST_CHANGE:
            continue
        for name in names:
            match = _HELD_OUT.fullmatch(name)
            values = [step[name] for step in steps if name in step]
            if match is None or match[1] in judges or len(values) < 3:
                continue
            if max(values[-2:]) < values[0] - LEAST_CHANGE:
                return judge, name, values[0], values[-1]
    return None


def _average(values: Sequence[float]) -> float:
    return sum(values) / len(values)
