"""The accuracy of each evaluation set in a report: at the start, at the end, and their difference, with intervals."""

from __future__ import annotations

from rlox_grpo.run.console import list_set_accuracies, shows_accuracy
from rlox_grpo.run.report.read import Table, read_metric
from rlox_grpo.run.report.text import escape

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


def _write(evaluations: Table, step: int, key: str, sign: str = "") -> str:
    """Write ``0.281 [0.19, 0.39]``; a dash if it was not measured."""
    numbers = [evaluations[step].get(f"{key}{end}") for end in ("", "_low", "_high")]
    value, *limits = (f"{each:{sign}.3f}" if isinstance(each, (int, float)) else None for each in numbers)
    if value is None:
        return escape("—")
    return value if None in limits else f"{value} [{limits[0]}, {limits[1]}]"
