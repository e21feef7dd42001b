"""Files of the run folder: JSON lines that stay readable after a kill, and completions, one file for each step."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np

from rlox_grpo.groups import count_sampled, list_rows, list_versions
from rlox_grpo.rewards.judge.judge import COSTS
from rlox_grpo.types import Completion, Float32Array, ScoredGroup

logger = logging.getLogger(__name__)

_FOLLOW = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_NO_FOLLOW = _FOLLOW | getattr(os, "O_NOFOLLOW", 0)
_REMEDY = "remove the line, or resume the run, which moves the line to a file with the suffix .broken"
_TORN = "%s: removed its last line, which was incomplete"


def read_jsonl(path: Path, *, limit: int | None = None, max_bytes: int | None = None) -> list[dict[str, Any]]:
    """Read a file with one JSON object in each line: all, or the first ``limit``.

    An incomplete last line is skipped: a run is writing it, or was killed by ``kill -9`` while it did.

    Raises:
        ValueError: A complete line is not a JSON object; the message names the file and the line.
        OSError: As :func:`open_regular`.
    """
    with open_regular(path, max_bytes=max_bytes) as lines:
        numbered = enumerate(islice(_list_lines(lines), limit), start=1)
        rows = (_parse(line, path, number) for number, line in numbered)
        return [row for row in rows if row is not None]


def _list_lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines up to the first without a newline: what is written after that read would begin in its middle."""
    for line in file:
        yield line
        if not line.endswith(b"\n"):
            return


def open_regular(path: Path, *, max_bytes: int | None = None, follow: bool = False) -> IO[bytes]:
    """Open a regular file for reading; pipes and devices are refused, and without ``follow`` symbolic links.

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
    """Remove the lines after ``step`` and an incomplete last line, for a run that resumes at ``step``.

    The file is replaced atomically. Nothing happens if it does not exist.

    Raises:
        ValueError: A complete line is not a JSON object with an integer ``step``. The file is not changed.
        OSError: The file cannot be read or written, or is not a regular file.
    """
    if not os.path.lexists(path):
        return
    remaining: list[bytes] = []
    later = torn = 0
    with open_regular(path) as lines:
        for number, line in enumerate(_list_lines(lines), start=1):
            row = _parse(line, path, number, with_step=True)
            if row is None:
                torn += 1
            elif row["step"] <= step:
                remaining.append(line if line.endswith(b"\n") else line + b"\n")
            else:
                later += 1
    if torn:
        logger.warning(_TORN, path)
    if later:
        logger.info("%s: removed %d lines of steps after %d, where the run resumes", path, later, max(step, 0))
    replace_file(path, b"".join(remaining))


def set_broken_lines_aside(path: Path) -> int:
    """Move lines that are not JSON objects with an integer ``step`` to ``PATH.broken``; return their number.

    A resumed run calls this, so that a line damaged by a disk or an editor does not stop it. An incomplete last line is
    left to :func:`cut_after`.

    Raises:
        OSError: The file cannot be read or written, or is not a regular file.
    """
    if not os.path.lexists(path):
        return 0
    valid: list[bytes] = []
    broken: dict[int, bytes] = {}
    with open_regular(path) as lines:
        for number, line in enumerate(_list_lines(lines), start=1):
            try:
                _parse(line, path, number, with_step=True)
                valid.append(line)
            except ValueError:
                broken[number] = line
    if not broken:
        return 0
    aside = path.with_name(f"{path.name}.broken")
    for line in broken.values():
        append_line(aside, line if line.endswith(b"\n") else line + b"\n")
    replace_file(path, b"".join(valid))
    shown = ", ".join(map(str, [*broken][:5])) + (", …" if len(broken) > 5 else "")
    logger.warning(
        "%s: moved %d line(s) that are not a step's JSON object to %s: %s", path, len(broken), aside.name, shown
    )
    return len(broken)


def append_line(path: Path, line: bytes) -> None:
    """Append one line completely, or leave the file as it was and raise OSError.

    An incomplete last line is removed first.

    Raises:
        OSError: The write failed, for example on a full disk, or ``path`` is not a regular file.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | _NO_FOLLOW | getattr(os, "O_NONBLOCK", 0), 0o666)
    with open(descriptor, "r+b", buffering=0) as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path}: not a regular file")
        size = _cut_torn_end(file, status.st_size)
        if size < status.st_size:
            logger.warning(_TORN, path)
        try:
            while line:  # a raw write may write only a part
                line = line[file.write(line) :]
        except OSError:
            file.truncate(size)
            raise


def _cut_torn_end(file: Any, size: int) -> int:
    """Remove an incomplete last line, which is left if an earlier cut failed; return the new size."""
    keep = size
    while keep > 0:
        start = max(0, keep - 4096)
        file.seek(start)
        block = file.read(keep - start)
        newline = block.rfind(b"\n")
        keep = start + newline + 1
        if newline >= 0:
            break
    if keep < size:
        file.truncate(keep)
    return keep


def replace_file(path: Path, content: bytes) -> None:
    """Replace the file ``path`` atomically: even after a crash it has either the old or the new content.

    The temporary file has a random name, so that nobody can prepare a link there. A link at ``path`` is replaced.

    Raises:
        OSError: The file cannot be written, for example on a full disk. The old file stays.
    """
    temporary = path.with_name(f".{path.name[:200]}.{os.urandom(8).hex()}.part")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_FOLLOW, 0o666)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_path(path.parent)


def sync_path(path: Path) -> None:
    """Call ``fsync`` on a file or a folder. Raises OSError."""
    if os.name == "nt" and path.is_dir():  # not possible on Windows
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_temporary_files(folder: Path) -> None:
    """Remove temporary files of killed :func:`replace_file` calls. The process must hold the lock of the run folder."""
    for path in folder.glob(".*.part"):
        if not path.is_dir():
            path.unlink(missing_ok=True)


def list_completions(run_dir: Path) -> dict[Path, int]:
    """Return the files of completions: path → step.

    Files of training are named ``step_*``, files of evaluations ``eval_step_*``, and those of a named set
    ``eval_<name>_step_*``.
    """
    paths = sorted((run_dir / "completions").glob("*step_*.jsonl"))
    matches = ((path, re.fullmatch(r"(?:eval_(?:[\w-]+_)?)?step_(\d+)\.jsonl", path.name)) for path in paths)
    return {path: int(match[1]) for path, match in matches if match}


def write_completions(
    run_dir: Path,
    step: int,
    groups: Sequence[ScoredGroup],
    advantages: Float32Array | None,
    *,
    limit: int = 64,
    kind: str = "step",
) -> Path:
    """Write one step's completions to ``run_dir/completions/<kind>_<step>.jsonl``, a JSON object for each.

    Keys: ``step``, ``prompt``, ``completion``, ``finish_reason``, ``length`` (sampled tokens), ``rewards`` (each
    component by name), ``reward`` (the weighted total), ``advantage``, ``policy_version``. A reward that does not apply
    is null, and so is the advantage if ``advantages`` is None; then ``prompt_index`` is the prompt's number among the
    held-out prompts, as several of them may have the same text. Without a tokenizer, ``prompt`` and ``completion`` are
    lists of token ids. ``pictures`` has the digests of the prompt's pictures, if it has any. ``origin`` is
    ``"demonstration"`` or ``"replay"`` for a completion that was not sampled in this step; its ``policy_version`` is
    the version of its group's samples. ``measures`` has what functions measured of the completion, by
    ``function/name``, such as the criteria of a judge, and ``feedback`` what rules say about it, by name; each is left
    out if it is empty. An episode of several turns also has ``stop_reason``, ``turns``, ``turn_rewards``,
    ``environment`` and ``messages``, after a failure ``error``, and with partial rollouts ``turn_versions``. Text is
    written as ASCII with escapes, so that lone surrogates are restored.

    Args:
        groups: Scored groups, N completions in all.
        advantages: ``float32 [N]``, prompt-major, or ``[N, K]``: one for each turn, NaN after the last. None for
            held-out prompts.
        limit: Largest number of rows. The first ones are written, so that groups stay together.
        kind: ``step`` for training, ``eval_step`` for held-out prompts, ``eval_<name>_step`` for a set with a name.

    Raises:
        ValueError: The lengths of ``advantages`` and ``groups`` differ.
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
        for index, completion in enumerate(scored.group.completions):
            rows.append(
                {
                    "step": step,
                    **({} if prompt.data_source is None else {"source": prompt.data_source}),
                    **({"prompt_index": int(prompt.index)} if advantages is None else {}),
                    "prompt": prompt.text if prompt.text is not None else prompt.token_ids.tolist(),
                    **({"pictures": [picture.digest for picture in prompt.pictures]} if prompt.pictures else {}),
                    "completion": completion.text if completion.text is not None else completion.token_ids.tolist(),
                    "finish_reason": completion.finish_reason,
                    "length": count_sampled(completion),
                    "rewards": {name: finite(values[index]) for name, values in scored.components.items()},
                    "reward": finite(scored.rewards[index]),
                    **_describe_verdict(scored, index),
                    "advantage": None if advantages is None else _list_advantages(advantages[len(rows)]),
                    "policy_version": scored.group.policy_version,
                    **({} if completion.origin is None else {"origin": completion.origin}),
                    **_describe_episode(completion),
                }
            )
    folder = run_dir / "completions"
    folder.mkdir(exist_ok=True)  # without parents: a run folder that was moved during the run is not made anew
    path = folder / f"{kind}_{step:06d}.jsonl"
    replace_file(path, b"".join(json_line(row) for row in rows[:limit]))
    return path


def _describe_verdict(scored: ScoredGroup, index: int) -> dict[str, Any]:
    """Return measures of a completion, other than a judge's costs, and feedback on it; without those that are empty."""
    measures = {
        name: value
        for name, values in scored.measures.items()
        if name.rpartition("/")[2] not in COSTS and (value := finite(values[index])) is not None
    }
    feedback = {name: text for name, texts in scored.feedback.items() if (text := texts[index])}
    return {key: table for key, table in (("measures", measures), ("feedback", feedback)) if table}


def _describe_episode(completion: Completion) -> dict[str, Any]:
    """Return the further keys of an episode of several turns; empty for a completion of one turn."""
    episode = completion.episode
    if episode is None:
        return {}
    paid = None if episode.turn_rewards is None else [finite(reward) for reward in episode.turn_rewards]
    turns = sum(len(row.turns) for row in list_rows(completion))
    shown: dict[str, Any] = {"stop_reason": episode.stop_reason, "turns": turns, "turn_rewards": paid}
    if completion.versions:
        shown["turn_versions"] = list_versions(completion)
    shown["environment"] = episode.environment
    if episode.error is not None:
        shown["error"] = episode.error
    shown["messages"] = _replace_non_finite(episode.messages)
    if episode.branch_messages:
        shown["branches"] = _replace_non_finite(episode.branch_messages)
    return shown


def _replace_non_finite(value: Any) -> Any:
    """Return JSON values with None in place of NaN and infinities, which an agent's tool call may contain."""
    if isinstance(value, Mapping):
        return {name: _replace_non_finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replace_non_finite(item) for item in value]
    return finite(value) if isinstance(value, float) else value


def _list_advantages(advantages: Any) -> float | list[float | None] | None:
    """Return the advantage of a completion, or the list of its turns' advantages."""
    return (
        finite(advantages)
        if np.ndim(advantages) == 0
        else [finite(value) for value in advantages[~np.isnan(advantages)]]
    )


def json_line(row: Mapping[str, Any]) -> bytes:
    """Return an object as one line of strict JSON, in ASCII, with the newline.

    Raises:
        ValueError: A number is not finite, which JSON cannot represent; see :func:`finite`.
    """
    return json.dumps(row, allow_nan=False).encode("ascii") + b"\n"


def finite(value: float | None) -> float | None:
    """Return ``value`` as a float, or None (JSON's null) for None, NaN, infinities and integers above 1.8e308."""
    try:
        return None if value is None or not math.isfinite(value) else float(value)
    except OverflowError:
        return None


def _parse(line: bytes, path: Path, number: int, *, with_step: bool = False) -> dict[str, Any] | None:
    """Return the object of one line; None for an incomplete last line: not a JSON object, and without a newline.

    An object without an integer ``step`` is an error ``with_step``.
    """
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # ValueError covers bytes that are not UTF-8
        row = None
    if isinstance(row, dict):
        if with_step and not isinstance(row.get("step"), int):
            raise ValueError(f"{path}:{number}: no integer 'step' in {line[:80]!r}")
        return row
    if not line.endswith(b"\n"):
        return None
    raise ValueError(f"{path}:{number}: not a JSON object: {line[:80]!r}; {_REMEDY}")
