"""The files in a run's folder: JSON lines that survive a kill, and sampled completions, one file a step."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rlox_grpo.types import Float32Array, ScoredGroup


def read_jsonl(path: Path, *, limit: int | None = None) -> list[dict[str, Any]]:
    """Read a file of JSON objects, one a line; a torn last line, as ``kill -9`` leaves it, is passed over.

    Args:
        path: The file to read.
        limit: Stop after this many objects.

    Raises:
        ValueError: A whole line is not a JSON object; the message names file and line.
    """
    rows: list[dict[str, Any]] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if limit is not None and len(rows) >= limit:
                break
            row = _parse(line, path, number)
            if row is not None:
                rows.append(row)
    return rows


def cut_after(path: Path, step: int) -> None:
    """Drop the lines of ``path`` past ``step``, and its torn last line; the file is replaced in one move.

    A run that resumes at ``step`` calls this before it writes again. A file that is not there stays so.

    Raises:
        ValueError: A whole line is not a JSON object with an integer ``step``; the file is left as it was.
    """
    if not path.exists():
        return
    kept: list[bytes] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            row = _parse(line, path, number)
            if row is None:
                continue
            if not isinstance(row.get("step"), int):
                raise ValueError(f"{path}:{number}: no integer 'step' in {line[:80]!r}")
            if row["step"] <= step:
                kept.append(line if line.endswith(b"\n") else line + b"\n")
    replace_file(path, b"".join(kept))


def replace_file(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path`` so that a reader, or a crash, meets the old file or the new one, never half.

    Raises:
        OSError: The disk is full or the folder cannot be written; the old file stands.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_completions(
    run_dir: Path,
    step: int,
    groups: Sequence[ScoredGroup],
    advantages: Float32Array | None,
    *,
    limit: int = 64,
    kind: Literal["step", "eval_step"] = "step",
) -> Path:
    """Write one step's completions to ``run_dir/completions/<kind>_<step>.jsonl``, a JSON object for each.

    Keys: ``step``, ``prompt``, ``completion``, ``finish_reason``, ``length`` (tokens), ``rewards`` (each component
    by name), ``reward`` (the weighted total), ``advantage``, ``policy_version``. A reward that did not apply is
    null, and so is every advantage when none are given. Where there is no tokenizer, ``prompt`` and ``completion``
    are lists of token ids. The text is ASCII with escapes: a lone surrogate comes back as it was.

    Args:
        run_dir: The run's folder; ``completions`` in it is made when it is missing.
        step: The training step that sampled them.
        groups: Scored groups in the order of the step.
        advantages: ``float32 [N]``, prompt-major over all of ``groups``, or None for held-out prompts.
        limit: Most rows that are written: the first ones, so that groups stay together.
        kind: ``step`` for training rollouts, ``eval_step`` for held-out prompts.

    Raises:
        ValueError: ``advantages`` has not one value for each completion.
        OSError: The file cannot be written.
    """
    num_rows = sum(len(scored.group.completions) for scored in groups)
    if advantages is not None and len(advantages) != num_rows:
        raise ValueError(f"advantages has {len(advantages)} values for {num_rows} completions")
    rows: list[dict[str, Any]] = []
    for scored in groups:
        if len(rows) >= limit:
            break
        prompt = scored.group.prompt
        for place, completion in enumerate(scored.group.completions):
            rows.append(
                {
                    "step": step,
                    "prompt": prompt.text if prompt.text is not None else prompt.token_ids.tolist(),
                    "completion": completion.text if completion.text is not None else completion.token_ids.tolist(),
                    "finish_reason": completion.finish_reason,
                    "length": len(completion.token_ids),
                    "rewards": {name: finite(values[place]) for name, values in scored.components.items()},
                    "reward": finite(scored.rewards[place]),
                    "advantage": None if advantages is None else finite(advantages[len(rows)]),
                    "policy_version": scored.group.policy_version,
                }
            )
    folder = run_dir / "completions"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{kind}_{step:06d}.jsonl"
    replace_file(path, b"".join(json_line(row) for row in rows[:limit]))
    return path


def json_line(row: Mapping[str, Any]) -> bytes:
    """One object as one line of strict JSON: ASCII, its newline included.

    Raises:
        ValueError: A number in it is not finite; JSON has no word for that (see ``finite``).
    """
    return json.dumps(row, allow_nan=False).encode("ascii") + b"\n"


def finite(value: float) -> float | None:
    """``value`` as a Python float, or None, JSON's null, where it is NaN or infinite."""
    value = float(value)
    return value if math.isfinite(value) else None


def _parse(line: bytes, path: Path, number: int) -> dict[str, Any] | None:
    """Return the object on one line; None for the torn end of a file: no newline, and not JSON."""
    try:
        row = json.loads(line)
    except ValueError as error:  # covers bytes that are not UTF-8
        if not line.endswith(b"\n"):
            return None
        raise ValueError(f"{path}:{number}: not a JSON object: {line[:80]!r}") from error
    if isinstance(row, dict):
        return row
    # `12` may be the torn start of nothing that we write, so only an object counts as a line.
    if not line.endswith(b"\n"):
        return None
    raise ValueError(f"{path}:{number}: not a JSON object: {line[:80]!r}")
