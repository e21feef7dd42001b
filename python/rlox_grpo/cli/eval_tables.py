"""The output of ``rlox-grpo eval``: tables of several sets and of two checkpoints, and the JSON file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlox_grpo.config.eval_set import UNNAMED
from rlox_grpo.run.eval_history import compare_shares
from rlox_grpo.run.evaluation import measure_prompts
from rlox_grpo.run.files import finite, replace_file
from rlox_grpo.types import ScoredGroup

Metrics = Mapping[str, float]
Groups = Mapping[str, Sequence[ScoredGroup]]
"""The scored groups of each set by its name."""

_WITH_INTERVAL = re.compile(r"accuracy|(?:pass|maj)@[0-9]+|mean_reward|mean_length|truncated_share")
"""The metrics of :func:`rlox_grpo.run.evaluation.evaluate` that may have an interval."""


def format_metrics(metrics: Mapping[str, Metrics]) -> list[str]:
    """Return the lines of the metrics of each set, with the intervals where a metric has one.

    A set without a name has a line for each number; sets with names are the columns of a table.
    """
    if UNNAMED in metrics:
        return [f"{name:24} {value:.4f}" for name, value in metrics[UNNAMED].items()]
    names = dict.fromkeys(name for numbers in metrics.values() for name in numbers if not _is_limit(name, numbers))
    rows = [["metric", *metrics]]
    rows += [[name, *(_format_cell(name, numbers) for numbers in metrics.values())] for name in names]
    return align(rows)


def compare_checkpoints(before: Groups, after: Groups) -> list[dict[str, Any]]:
    """Compare the accuracies of two checkpoints, prompt by prompt: a row for each set.

    ``difference`` is the accuracy of the second less that of the first, a mean over the prompts, with ``low`` and
    ``high`` of its 95 % confidence interval. ``better`` is ``"A"`` or ``"B"``, or None if the interval has 0.
    """
    rows = []
    for name, groups in after.items():
        shares = measure_prompts(before[name]), measure_prompts(groups)
        compared = compare_shares("difference", *shares, samples=len(groups[0].group.completions))
        difference, low, high = (compared.get(f"difference{end}") for end in ("", "_low", "_high"))
        better = "B" if low is not None and low > 0 else "A" if high is not None and high < 0 else None
        rows.append({"set": name or None, "difference": difference, "low": low, "high": high, "better": better})
    return rows


def format_comparison(checkpoints: Sequence[str], metrics: Sequence[Mapping[str, Metrics]], rows: Any) -> list[str]:
    """Return the lines of the comparison of two checkpoints: their accuracies, the difference and the verdict."""
    table = [["set", "A", "B", "B − A", "verdict"]]
    for row in rows:
        accuracies = [_format_cell("accuracy", numbers[row["set"] or UNNAMED]) for numbers in metrics]
        difference = "–" if row["difference"] is None else f"{row['difference']:+.4f}"
        if row["low"] is not None:
            difference += f" [{row['low']:+.4f}, {row['high']:+.4f}]"
        verdict = f"{row['better']} is better" if row["better"] else "no difference is shown"
        table.append([row["set"] or "data", *accuracies, difference, verdict])
    return [f"A: {checkpoints[0]}", f"B: {checkpoints[1]}", *align(table)]


def show_results(
    output: Path | None, checkpoints: Sequence[str], metrics: Sequence[Mapping[str, Metrics]], rows: Any = None
) -> None:
    """Write the results to the file ``output``, if there is any, and print them.

    An evaluation is long, so that each is done even if the other fails.

    Args:
        output: a file for :func:`write_results`.
        checkpoints: the checkpoint, or two.
        metrics: the metrics of each checkpoint by set.
        rows: what :func:`compare_checkpoints` returned, if there are two checkpoints.

    Raises:
        OSError: the file cannot be written.
    """
    try:
        if output is not None:
            write_results(output, checkpoints, metrics, rows)
    finally:
        shown = format_metrics(metrics[0]) if rows is None else format_comparison(checkpoints, metrics, rows)
        print("\n".join(shown))


def write_results(
    path: Path, checkpoints: Sequence[str], metrics: Sequence[Mapping[str, Metrics]], rows: Any = None
) -> None:
    """Write the checkpoints, their metrics by set, and the rows of :func:`compare_checkpoints` as JSON.

    A number that is not finite is null, and the name of a set without one is the empty text.

    Raises:
        OSError: the file cannot be written.
    """
    numbers = [
        {name: {metric: finite(value) for metric, value in values.items()} for name, values in by_set.items()}
        for by_set in metrics
    ]
    document = {"checkpoints": list(checkpoints), "metrics": numbers, **({} if rows is None else {"differences": rows})}
    replace_file(path, json.dumps(document, indent=2, allow_nan=False).encode() + b"\n")


def align(rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a line for each row, with its cells in columns."""
    table = list(rows)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]


def _format_cell(name: str, numbers: Metrics) -> str:
    if name not in numbers:
        return "–"
    limits = _read_limits(name, numbers)
    return f"{numbers[name]:.4f}" if limits is None else f"{numbers[name]:.4f} [{limits[0]:.4f}, {limits[1]:.4f}]"


def _read_limits(name: str, numbers: Metrics) -> tuple[float, float] | None:
    """Return the limits of a metric's interval; None without an interval.

    A reward may have any name, such as ``fluency_low`` beside ``fluency``, and none has an interval.
    """
    low, high = numbers.get(f"{name}_low"), numbers.get(f"{name}_high")
    return None if low is None or high is None or _WITH_INTERVAL.fullmatch(name) is None else (low, high)


def _is_limit(name: str, numbers: Metrics) -> bool:
    return any(
        name.endswith(end) and _read_limits(name.removesuffix(end), numbers) is not None for end in ("_low", "_high")
    )
