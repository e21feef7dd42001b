"""The accuracy of each evaluation set in a report, and the differences over a run or between runs, with intervals."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlox_grpo.run.console import list_set_accuracies, shows_accuracy
from rlox_grpo.run.eval_history import compare_shares
from rlox_grpo.run.report.read import Run, Table, read_metric
from rlox_grpo.run.report.samples import read_verdicts
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


def compare_runs(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Return a row of a table for each set that all runs evaluated: its name, and a cell of HTML for each run.

    A cell has the accuracy over the logged prompts of the last evaluation. From the second run on, it also has the
    difference to the first run, paired over the prompts that both have logged, with its 95 % confidence interval.
    """
    rows = []
    for name in (name for name in runs[0].held_out if all(run.held_out.get(name) for run in runs)):
        cells, first = list[str](), dict[str, list[bool]]()
        for number, run in enumerate(runs):
            step = max(run.held_out[name])
            verdicts = read_verdicts(run.held_out[name][step])
            if number == 0:
                first = verdicts
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
