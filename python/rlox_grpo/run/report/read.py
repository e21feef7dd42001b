"""Read a run's folder: what is there, and what is missing."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlox_grpo.run.files import open_regular, read_jsonl

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LARGEST_SHOWN = 1e100
"""Numbers beyond it count as not finite: charts add, square and average what they show."""

Table = dict[int, dict[str, float | None]]
"""Step → metric → value; None where it was not finite."""


@dataclass(frozen=True)
class Run:
    """All that a report needs of one run.

    Attributes:
        name: The folder's name.
        config: The resolved configuration, flat: ``section.key`` → value; empty when there is no file.
        metrics: Training metrics by step, in ascending order.
        evaluations: Held-out metrics by step, in ascending order.
        samples: Training step → its file of completions, ascending.
        held_out: Step of an evaluation → its file of completions, ascending.
    """

    name: str
    config: dict[str, Any]
    metrics: Table
    evaluations: Table
    samples: dict[int, Path]
    held_out: dict[int, Path]


def read_run(run_dir: Path) -> Run:
    """Read a run's folder; any of its files may be missing.

    Raises:
        FileNotFoundError: There is no such folder.
        ValueError: A file is broken; the message names it and the line.
    """
    if not run_dir.is_dir():
        raise FileNotFoundError(f"{run_dir}: no such folder; a report is made from the output_dir of a run")
    metrics = _read_table(run_dir / "metrics.jsonl")
    evaluations = _read_table(run_dir / "evaluations.jsonl")
    for step, row in metrics.items():  # an evaluation may also be reported among the step's metrics
        found = {key.removeprefix("eval/"): value for key, value in row.items() if key.startswith("eval/")}
        if found:
            evaluations.setdefault(step, {}).update(found)
    return Run(
        name=run_dir.resolve().name,
        config=_read_config(run_dir / "config.toml"),
        metrics=metrics,
        evaluations=dict(sorted(evaluations.items())),
        samples=_completion_files(run_dir, "step"),
        held_out=_completion_files(run_dir, "eval_step"),
    )


def _read_table(path: Path) -> Table:
    table: Table = {}
    for number, row in enumerate(read_jsonl(path) if os.path.lexists(path) else [], start=1):
        step = row.pop("step", None)
        if not isinstance(step, int):
            raise ValueError(f"{path}:{number}: no integer 'step'")
        if abs(step) > 2**53:
            raise ValueError(f"{path}:{number}: 'step' has {len(str(step))} digits")
        values = table.setdefault(step, {})
        for key, value in row.items():
            if value is not None and not isinstance(value, (int, float)):
                raise ValueError(f"{path}:{number}: {key!r} is not a number: {value!r}")
            values[key] = _shown(value)
    return dict(sorted(table.items()))


def _shown(value: float | None) -> float | None:
    """A number that a chart can show: finite, and so far from the largest float that sums of it are finite too."""
    try:
        number = math.nan if value is None else float(value)
    except OverflowError:  # an integer of more than 308 digits
        return None
    return number if abs(number) <= LARGEST_SHOWN else None


def _read_config(path: Path) -> dict[str, Any]:
    if not os.path.lexists(path):
        return {}
    try:
        with open_regular(path) as file:
            return dict(_flatten(tomllib.loads(file.read().decode("utf-8")), ""))
    except ValueError as error:  # TOML's own error, and bytes that are not UTF-8
        raise ValueError(f"{path}: {error}") from error


def _flatten(table: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for key, value in table.items():
        flat += _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, value)]
    return flat


def _completion_files(run_dir: Path, kind: str) -> dict[int, Path]:
    found = {}
    for path in (run_dir / "completions").glob(f"{kind}_*.jsonl"):
        match = re.fullmatch(rf"{kind}_(\d+)\.jsonl", path.name)
        if match:
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def column(table: Table, key: str) -> list[float | None]:
    """One metric at each step of ``table``, None at the steps that do not have it."""
    return [row.get(key) for row in table.values()]


def known(table: Table, key: str) -> list[tuple[int, float]]:
    """Return the steps at which a metric has a value, and the values."""
    return [(step, value) for step, row in table.items() if (value := row.get(key)) is not None]
