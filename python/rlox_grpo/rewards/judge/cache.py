"""Verdicts of earlier questions, in a folder of JSON lines.

Each process appends to its own file and reads the files of all others. A line is written as soon as the judge has
replied. A process that is killed may leave its last line incomplete; such a line is not read, and its question is asked
again. A process claims a question before it asks it, by a lock that the system releases with the process, so that ranks
and runs which share the folder ask nothing twice.
"""

from __future__ import annotations

import json
import os
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
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

_MOST_REPLIES = 50_000
"""Replies in memory, those of the newest verdicts."""

_LONGEST_REPLY = 8192
"""Characters of a reply in memory, more than a judge stores."""

_LONGEST_LINE = 2**20
_CLAIMS = "claims"
"""The file whose bytes are locked. It stays empty."""

_CLAIMED: set[tuple[Path | None, str]] = set()
"""Folder and question of each claim of this process, which the system's locks do not keep from itself."""


class VerdictCache:
    """Verdicts by the digest of their question.

    Args:
        folder: where the files are; it is made at the first write. None: verdicts are only in memory.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._verdicts: dict[str, Any] = {}
        self._replies: dict[str, str] = {}
        self._file: Path | None = None
        self._read: dict[Path, int] = {}  # bytes that were read of each file
        self._claims: int | None = None
        self._read_new()

    def find(self, key: str) -> tuple[Any] | None:
        """Return the verdict of a question in a tuple, as JSON values: ``(None,)`` for a reply without one."""
        return (self._verdicts[key],) if key in self._verdicts else None

    def find_reply(self, key: str) -> str:
        """Return the judge's reply to a question as far as it was stored; "" for a verdict that is old."""
        return self._replies.get(key, "")

    def claim(self, key: str) -> bool:
        """Whether this process may ask the question; False while another one asks it.

        Afterwards :meth:`find` knows the verdicts of all processes. A claim ends with :meth:`release`.

        Raises:
            OSError: the folder cannot be made.
        """
        is_claimed = (self._folder, key) not in _CLAIMED and self._lock(key, release=False)
        if is_claimed:
            _CLAIMED.add((self._folder, key))
        self._read_new()
        return is_claimed

    def release(self, key: str) -> None:
        """End :meth:`claim`, if it was successful."""
        _CLAIMED.discard((self._folder, key))
        self._lock(key, release=True)

    def add(self, key: str, verdict: Any, about: Mapping[str, Any]) -> None:
        """Store the verdict of a question; ``about`` has the judge's ``reply``, and what only readers of the file need.

        Raises:
            OSError: the line cannot be written, for example on a full disk.
        """
        self._remember({"key": key, "verdict": verdict, **about})
        if self._folder is None:
            return
        line = json.dumps({"key": key, "verdict": verdict, **about}).encode() + b"\n"
        path = self._file or self._begin_file(self._folder)
        self._file = None  # after a failure in the middle of a line, the next one is in another file
        with open(path, "ab", buffering=0) as file:
            while line:  # a raw write may write only a part
                line = line[file.write(line) :]
            self._read[path] = file.tell()
            self._file = path if file.tell() < _FILE_BYTES else None

    def _lock(self, key: str, *, release: bool) -> bool:
        """Lock or release the byte of the question in the file of claims; True where there are no locks."""
        if self._folder is None or sys.platform == "win32":
            return True
        import fcntl

        if self._claims is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._claims = os.open(self._folder / _CLAIMS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            weakref.finalize(self, os.close, self._claims)  # not before: closing it gives up its locks
        try:
            fcntl.lockf(self._claims, fcntl.LOCK_UN if release else fcntl.LOCK_EX | fcntl.LOCK_NB, 1, int(key[:15], 16))
        except (BlockingIOError, PermissionError):
            return False
        except OSError:  # a file system without locks
            return True
        return True

    def _read_new(self) -> None:
        """Read what other processes have written since."""
        for path in () if self._folder is None else list_files(self._folder):
            for line, end in _read_lines(path, self._read.get(path, 0)):
                self._read[path] = end
                if line is not None:
                    self._remember(line)

    def _remember(self, line: Mapping[str, Any]) -> None:
        reply = line.get("reply")
        self._verdicts.pop(line["key"], None)
        self._verdicts[line["key"]] = line["verdict"]
        self._replies.pop(line["key"], None)
        self._replies[line["key"]] = reply[:_LONGEST_REPLY] if isinstance(reply, str) else ""
        for entries, most in ((self._verdicts, _MOST_ENTRIES), (self._replies, _MOST_REPLIES)):
            if len(entries) > most:
                del entries[next(iter(entries))]

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
    """Return the files of a cache, oldest first; neither folders nor pipes, whose reading could wait forever."""
    paths = folder.glob("[0-9]*-*.jsonl") if folder.is_dir() else ()
    return sorted(path for path in paths if path.name.partition("-")[0].isdigit() and path.is_file())


def read_lines(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a cache, oldest files first. Incomplete, too long and malformed lines are left out."""
    for path in list_files(folder):
        for line, _ in _read_lines(path, 0):
            if line is not None:
                yield line


def _read_lines(path: Path, start: int) -> Iterator[tuple[dict[str, Any] | None, int]]:
    """Yield the lines of a file from the byte ``start`` on, None for one that is not read, and the byte after each.

    A last line without a line break is left out, because it is incomplete or is still being written.
    """
    with suppress(FileNotFoundError), open(path, "rb") as file:  # another process may have removed the file
        file.seek(start)
        while line := file.readline(_LONGEST_LINE):
            if not line.endswith(b"\n") and len(line) < _LONGEST_LINE:
                return
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                entry = None
            is_read = isinstance(entry, dict) and isinstance(entry.get("key"), str) and "verdict" in entry
            yield entry if is_read else None, file.tell()
