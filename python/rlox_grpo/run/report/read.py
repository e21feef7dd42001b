"""Read a run folder for its report. Any file may be missing, damaged or hostile: folders are shared."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlox_grpo.config.toml import parse_toml
from rlox_grpo.run.files import finite, list_completions, open_regular, read_jsonl

Table = dict[int, dict[str, float | None]]
"""Step → metric → value; None if the value was not finite."""

MAX_BYTES = 2**28
"""Size limit of the files that a report reads, about the metrics of a hundred thousand steps."""

_FILES = ("config.toml", "metrics.jsonl", "evaluations.jsonl", "warnings.jsonl", "completions")

_MAX_STEP = 2**53  # JavaScript holds integers up to here


@dataclass(frozen=True)
class Run:
    """The content of a run folder. Mappings by step are in ascending order.

    Attributes:
        config: The resolved configuration, ``section.key`` → value; empty without a file.
        warnings: Warnings of guards: rows with ``step``, ``guard`` and ``message``.
        samples: Training step → file of completions.
        held_out: Step of an evaluation → file of completions.
    """

    name: str
    config: dict[str, Any]
    metrics: Table
    evaluations: Table
    warnings: list[dict[str, Any]]
    samples: dict[int, Path]
    held_out: dict[int, Path]


def read_run(run_dir: Path) -> Run:
    """Read a run folder.

    Raises:
        FileNotFoundError: The folder does not exist, or holds no file of a run.
        ValueError: A file is damaged; the message names the file and the line.
        OSError: A file is larger than ``MAX_BYTES`` or not a regular file.
    """
    if not run_dir.is_dir():
        raise FileNotFoundError(f"{run_dir}: no such folder; a report is made from the output_dir of a run")
    if not any(os.path.lexists(run_dir / name) for name in _FILES):
        raise FileNotFoundError(
            f"{run_dir}: no file of a run in this folder; a report is made from the output_dir of a run"
        )
    metrics = _read_table(run_dir / "metrics.jsonl")
    evaluations = _read_table(run_dir / "evaluations.jsonl")
    for step, row in metrics.items():  # an evaluation may also be reported among the step's metrics
        evaluation = {key.removeprefix("eval/"): value for key, value in row.items() if key.startswith("eval/")}
        if evaluation:
            evaluations.setdefault(step, {}).update(evaluation)
    if (run_dir / "completions").is_symlink():
        raise OSError(f"{run_dir / 'completions'}: a symbolic link, expected a folder")
    completions = sorted((step, path) for path, step in list_completions(run_dir).items())
    held_out = [(step, path) for step, path in completions if path.name.startswith("eval_")]
    # With several sets, the completions of the first.
    first = min((path.name.rpartition("step_")[0] for _, path in held_out), default="")
    return Run(
        name=run_dir.resolve().name,
        config=_read_config(run_dir / "config.toml"),
        metrics=metrics,
        evaluations=dict(sorted(evaluations.items())),
        warnings=read_rows(run_dir / "warnings.jsonl"),
        samples={step: path for step, path in completions if path.name.startswith("step_")},
        held_out={step: path for step, path in held_out if path.name.startswith(f"{first}step_")},
    )


def read_rows(path: Path, *, limit: int | None = None) -> list[dict[str, Any]]:
    """Read at most ``limit`` objects of a file of JSON lines; none if there is no file.

    Raises:
        ValueError, OSError: See :func:`read_run`.
    """
    try:
        return read_jsonl(path, limit=limit, max_bytes=MAX_BYTES)
    except FileNotFoundError:
        return []


def _read_table(path: Path) -> Table:
    table: Table = {}
    for number, row in enumerate(read_rows(path), start=1):
        step = row.pop("step", None)
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step <= _MAX_STEP:
            raise ValueError(f"{path}:{number}: no integer 'step' of 0 to 2**53")
        values = table.setdefault(step, {})
        for key, value in row.items():
            if value is not None and not isinstance(value, (int, float)):
                raise ValueError(f"{path}:{number}: {key!r} is not a number: {value!r:.80}")
            values[key] = finite(value)
    return dict(sorted(table.items()))


def _read_config(path: Path) -> dict[str, Any]:
    try:
        with open_regular(path, max_bytes=MAX_BYTES) as file:
            return dict(_flatten(parse_toml(file.read().decode()), ""))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:  # TOML's own error, and bytes that are not UTF-8
        raise ValueError(f"{path}: {error}") from error


def _flatten(table: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for key, value in table.items():
        flat += _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, value)]
    return flat


def column(table: Table, key: str) -> list[float | None]:
    """Return one metric at each step of ``table``; None at steps without it."""
    return [row.get(key) for row in table.values()]


def read_metric(table: Table, key: str) -> list[tuple[int, float]]:
    """Return the steps with a value of a metric, and the values."""
    return [(step, value) for step, row in table.items() if (value := row.get(key)) is not None]
