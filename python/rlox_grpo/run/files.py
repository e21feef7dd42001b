"""The files in a run's folder: JSON lines that survive a kill, and sampled completions, one file a step."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from rlox_grpo.groups import count_sampled, list_rows
from rlox_grpo.types import Completion, Float32Array, ScoredGroup

logger = logging.getLogger(__name__)

_FOLLOW = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_NO_FOLLOW = _FOLLOW | getattr(os, "O_NOFOLLOW", 0)
_REMEDY = "remove the line, or resume the run, which moves it to a file of the name with .broken behind it"
_TORN = "%s: removed its last line, which was written in part"
_PART = re.compile(r"\..+\.part")


def read_jsonl(path: Path, *, limit: int | None = None, max_bytes: int | None = None) -> list[dict[str, Any]]:
    """Read a file of JSON objects, one a line; a torn last line, as ``kill -9`` leaves it, is passed over.

    Args:
        path: The file to read.
        limit: Stop after this many objects.
        max_bytes: Refuse a larger file.

    Raises:
        ValueError: A whole line is not a JSON object; the message names file and line.
        OSError: As :func:`open_regular`.
    """
    rows: list[dict[str, Any]] = []
    with open_regular(path, max_bytes=max_bytes) as lines:
        for number, line in enumerate(lines, start=1):
            if limit is not None and len(rows) >= limit:
                break
            row = _parse(line, path, number)
            if row is not None:
                rows.append(row)
    return rows


def open_regular(path: Path, *, max_bytes: int | None = None, follow: bool = False) -> IO[bytes]:
    """Open a file of a run's folder for reading; a symbolic link, a pipe or a device is refused.

    ``follow`` takes the regular file that a link names.

    Raises:
        OSError: The file does not exist, cannot be read, is not a regular file, or is larger than ``max_bytes``.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | (_FOLLOW if follow else _NO_FOLLOW) | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(f"{path}: a symbolic link, expected a regular file") from None
        raise
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise OSError(f"{path}: not a regular file")
    if max_bytes is not None and status.st_size > max_bytes:
        os.close(descriptor)
        raise OSError(f"{path}: {status.st_size:,} bytes, expected at most {max_bytes:,}")
    return open(descriptor, "rb")


def cut_after(path: Path, step: int) -> None:
    """Drop the lines of ``path`` past ``step``, and its torn last line; the file is replaced in one move.

    A run that resumes at ``step`` calls this before it writes again; what is dropped is logged. A file that is not
    there stays so.

    Raises:
        ValueError: A whole line is not a JSON object with an integer ``step``; the file is left as it was.
        OSError: It cannot be read or written, or is not a regular file.
    """
    if not os.path.lexists(path):
        return
    kept: list[bytes] = []
    later = torn = 0
    with open_regular(path) as lines:
        for number, line in enumerate(lines, start=1):
            row = _parse(line, path, number)
            if row is None:
                torn += 1
                continue
            if not isinstance(row.get("step"), int):
                raise ValueError(f"{path}:{number}: no integer 'step' in {line[:80]!r}")
            if row["step"] <= step:
                kept.append(line if line.endswith(b"\n") else line + b"\n")
            else:
                later += 1
    if torn:
        logger.warning(_TORN, path)
    if later:
        logger.info("%s: removed %d lines of steps after %d, from which the run goes on", path, later, max(step, 0))
    replace_file(path, b"".join(kept))


def set_broken_lines_aside(path: Path) -> int:
    """Move lines that are not JSON objects with an integer ``step`` to ``PATH.broken``, with a log; return how many.

    A disk or an editor may break a line in the middle; a run that resumes calls this, so that it can go on. A torn last
    line is left to :func:`cut_after`.

    Raises:
        OSError: It cannot be read or written, or is not a regular file.
    """
    if not os.path.lexists(path):
        return 0
    kept: list[bytes] = []
    broken: list[bytes] = []
    numbers: list[int] = []
    with open_regular(path) as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = _parse(line, path, number)
                whole = row is None or isinstance(row.get("step"), int)
            except ValueError:
                whole = False
            (kept if whole else broken).append(line)
            if not whole:
                numbers.append(number)
    if not broken:
        return 0
    aside = path.with_name(f"{path.name}.broken")
    for line in broken:
        append_line(aside, line if line.endswith(b"\n") else line + b"\n")
    replace_file(path, b"".join(kept))
    shown = ", ".join(map(str, numbers[:5])) + (", …" if len(numbers) > 5 else "")
    logger.warning(
        "%s: moved %d line(s) that are not a step's JSON object to %s: %s", path, len(broken), aside.name, shown
    )
    return len(broken)


def last_step(path: Path) -> int:
    """The step of the last whole line that has one; 0 where there is none, or no such file.

    Raises:
        ValueError: A whole line is not a JSON object.
        OSError: It cannot be read, or is not a regular file.
    """
    if not os.path.lexists(path):
        return 0
    return max((row["step"] for row in read_jsonl(path) if isinstance(row.get("step"), int)), default=0)


def append_line(path: Path, line: bytes) -> None:
    """Append one line; a write that fails is cut off again, so that lines stay whole.

    Raises:
        OSError: The disk is full, went away, or ``path`` is not a regular file.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | _NO_FOLLOW | getattr(os, "O_NONBLOCK", 0), 0o666)
    with open(descriptor, "r+b", buffering=0) as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path}: not a regular file")
        append_or_cut(file, line, path)


def append_or_cut(file: Any, line: bytes, path: Path) -> None:
    """Write ``line`` at the end of ``path``, whole or not at all; ``file`` is unbuffered and can be read too.

    Raises:
        OSError: The disk is full or went away.
    """
    before = os.fstat(file.fileno()).st_size
    size = _cut_torn_end(file, before)
    if size < before:
        logger.warning(_TORN, path)
    try:
        while line:  # a raw write may take only a part, the last bytes of a full disk
            line = line[file.write(line) :]
    except OSError:
        file.truncate(size)
        raise


def _cut_torn_end(file: Any, size: int) -> int:
    """Cut what follows the last newline, where an earlier cut failed too; return the size."""
    keep = size
    while keep > 0:
        start = max(0, keep - 4096)
        file.seek(start)
        block = file.read(keep - start)
        place = block.rfind(b"\n")
        keep = start + place + 1
        if place >= 0:
            break
    if keep < size:
        file.truncate(keep)
    return keep


def replace_file(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path`` so that a reader, or a crash, meets the old file or the new one, never half.

    The new file is made under a random name, which nobody can have planted; a symbolic link at ``path`` is replaced.

    Raises:
        OSError: The disk is full or the folder cannot be written; the old file stands.
    """
    part = path.with_name(f".{path.name[:200]}.{os.urandom(8).hex()}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_FOLLOW, 0o666)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    sync_path(path.parent)


def sync_path(path: Path) -> None:
    """Ask the disk to hold a file, or the names in a folder, before anything points to it. Raises OSError."""
    if os.name == "nt" and path.is_dir():  # Windows opens no folder
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_parts(folder: Path) -> None:
    """Remove what processes left that were killed within :func:`replace_file`; only the run's holder may."""
    for path in folder.glob(".*.part"):
        if _PART.fullmatch(path.name) and not path.is_dir():
            path.unlink(missing_ok=True)


def list_completions(run_dir: Path) -> dict[Path, int]:
    """The files of completions, of training and of evaluations, each with its step."""
    found = sorted((run_dir / "completions").glob("*step_*.jsonl"))
    matches = ((path, re.fullmatch(r"(?:eval_)?step_(\d+)\.jsonl", path.name)) for path in found)
    return {path: int(match[1]) for path, match in matches if match}


def remove_later_completions(run_dir: Path, step: int) -> None:
    """Remove the completions of steps past ``step``, which a resumed run samples again; logs how many."""
    later = [path for path, own in list_completions(run_dir).items() if own > step]
    for path in later:
        path.unlink(missing_ok=True)
    if later:
        logger.info("%s: removed the completions of %d steps after %d", run_dir, len(later), max(step, 0))


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

    Keys: ``step``, ``prompt``, ``completion``, ``finish_reason``, ``length`` (sampled tokens), ``rewards`` (each
    component by name), ``reward`` (the weighted total), ``advantage``, ``policy_version``. A reward that did not apply
    is null, and so is every advantage when none are given. Where there is no tokenizer, ``prompt`` and ``completion``
    are lists of token ids. An episode of several turns has ``stop_reason``, ``turns``, ``turn_rewards`` and
    ``messages`` too, and with partial rollouts ``turn_versions``. The text is ASCII with escapes: a lone surrogate
    comes back as it was.

    Args:
        run_dir: The run's folder; ``completions`` in it is made when it is missing.
        step: The training step that sampled them.
        groups: Scored groups in the order of the step.
        advantages: ``float32 [N]``, prompt-major over all of ``groups``, or None for held-out prompts. ``[N, K]``: one
            for each turn, NaN after the last; ``advantage`` is then a list.
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
                    "length": count_sampled(completion),
                    "rewards": {name: finite(values[place]) for name, values in scored.components.items()},
                    "reward": finite(scored.rewards[place]),
                    "advantage": None if advantages is None else _list_advantages(advantages[len(rows)]),
                    "policy_version": scored.group.policy_version,
                    **_describe_episode(completion),
                }
            )
    folder = run_dir / "completions"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{kind}_{step:06d}.jsonl"
    replace_file(path, b"".join(json_line(row) for row in rows[:limit]))
    return path


def _describe_episode(completion: Completion) -> dict[str, Any]:
    """What an episode of several turns has beside a completion of one; empty for the latter."""
    episode = completion.episode
    if episode is None:
        return {}
    paid = None if episode.turn_rewards is None else [*episode.turn_rewards]
    turns = sum(len(row.turns) for row in list_rows(completion))
    shown: dict[str, Any] = {"stop_reason": episode.stop_reason, "turns": turns, "turn_rewards": paid}
    if completion.versions:
        shown["turn_versions"] = [version for row in list_rows(completion) for version in row.versions]
    shown["messages"] = [dict(message) for message in episode.messages]
    if episode.branch_messages:
        shown["branches"] = [[dict(message) for message in messages] for messages in episode.branch_messages]
    return shown


def _list_advantages(own: Any) -> float | list[float | None] | None:
    """A completion's advantage, or those of its turns."""
    return finite(own) if np.ndim(own) == 0 else [finite(value) for value in own[~np.isnan(own)]]


def json_line(row: Mapping[str, Any]) -> bytes:
    """One object as one line of strict JSON: ASCII, its newline included.

    Raises:
        ValueError: A number in it is not finite; JSON has no word for that (see ``finite``).
    """
    return json.dumps(row, allow_nan=False).encode("ascii") + b"\n"


def finite(value: float | None) -> float | None:
    """``value`` as a Python float; None, JSON's null, for None, NaN, an infinity or an integer beyond 1.8e308."""
    try:
        return None if value is None or not math.isfinite(value) else float(value)
    except OverflowError:
        return None


def _parse(line: bytes, path: Path, number: int) -> dict[str, Any] | None:
    """Return the object on one line; None for the torn end of a file: no newline, and not JSON."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # ValueError covers bytes that are not UTF-8
        if not line.endswith(b"\n"):
            return None
        raise ValueError(f"{path}:{number}: not a JSON object: {line[:80]!r}; {_REMEDY}") from error
    if isinstance(row, dict):
        return row
    # `12` may be the torn start of nothing that we write, so only an object counts as a line.
    if not line.endswith(b"\n"):
        return None
    raise ValueError(f"{path}:{number}: not a JSON object: {line[:80]!r}; {_REMEDY}")
