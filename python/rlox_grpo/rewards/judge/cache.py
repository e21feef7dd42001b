"""Verdicts of earlier questions, in a folder of JSON lines.

Each process appends to a file of its own and reads those of all others when it starts, so ranks and runs need no lock.
A line is written as soon as the judge has replied. A process that is killed may leave its last line torn; such a line
is not read, and its question is asked again.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

FOLDER = "judge"
"""The folder of the cache in a run's folder."""

MOST_BYTES = 2**32
"""Bytes of all files. Beyond, the oldest files are removed."""

_FILE_BYTES = 2**26
"""Bytes of a file, after which another is begun."""

_MOST_ENTRIES = 1_000_000
"""Verdicts in memory. Beyond, the oldest are forgotten."""

_LONGEST_LINE = 2**20


class VerdictCache:
    """Verdicts by the digest of their question.

    Args:
        folder: where the files are; it is made at the first write. None: verdicts are only in memory.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._verdicts: dict[str, Any] = {}
        self._file: Path | None = None
        if folder is not None:
            for line in read_lines(folder):
                self._remember(line["key"], line["verdict"])

    def find(self, key: str) -> tuple[Any] | None:
        """Return the verdict of a question in a tuple, as JSON values: ``(None,)`` for a reply without one."""
        return (self._verdicts[key],) if key in self._verdicts else None

    def add(self, key: str, verdict: Any, about: Mapping[str, Any]) -> None:
        """Store the verdict of a question; ``about`` has further information for readers of the file.

        Raises:
            OSError: the line cannot be written, for example on a full disk.
        """
        self._remember(key, verdict)
        if self._folder is None:
            return
        line = json.dumps({"key": key, "verdict": verdict, **about}).encode() + b"\n"
        path = self._file or self._begin_file(self._folder)
        self._file = None  # after a failure in the middle of a line, the next one is in another file
        with open(path, "ab", buffering=0) as file:
            while line:  # a raw write may write only a part
                line = line[file.write(line) :]
            self._file = path if file.tell() < _FILE_BYTES else None

    def _remember(self, key: str, verdict: Any) -> None:
        self._verdicts.pop(key, None)
        self._verdicts[key] = verdict
        if len(self._verdicts) > _MOST_ENTRIES:
            del self._verdicts[next(iter(self._verdicts))]

    def _begin_file(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        sizes = {path: path.stat().st_size for path in list_files(folder)}
        for path in list(sizes):
            if sum(sizes.values()) <= MOST_BYTES - _FILE_BYTES:
                break
            del sizes[path]
            path.unlink(missing_ok=True)
        numbers = [int(path.name.partition("-")[0]) for path in sizes] or [0]
        return folder / f"{max(numbers) + 1:06d}-{os.urandom(8).hex()}.jsonl"


def list_files(folder: Path) -> list[Path]:
    """Return the files of a cache, oldest first."""
    paths = folder.glob("[0-9]*-*.jsonl") if folder.is_dir() else ()
    return sorted(path for path in paths if path.name.partition("-")[0].isdigit())


def read_lines(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a cache, oldest files first. Lines that are torn, too long or of another form are left out."""
    for path in list_files(folder):
        with open(path, "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                continue
            while line := file.readline(_LONGEST_LINE):
                try:
                    entry = json.loads(line) if line.endswith(b"\n") else None
                except (ValueError, RecursionError):
                    continue
                if isinstance(entry, dict) and isinstance(entry.get("key"), str) and "verdict" in entry:
                    yield entry
