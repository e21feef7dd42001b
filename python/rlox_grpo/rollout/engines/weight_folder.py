"""The folder of a run's weight files. A later run removes the folders that killed processes have left behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path

PREFIX = "rlox-grpo-weights-"
_LOCK = "lock"
_YOUNG_S = 60.0
"""Age in seconds. A younger folder is not removed, because its process may be about to lock it."""


class WeightFolder:
    """A new folder ``path``, locked until this process ends."""

    def __init__(self, parent: str | Path | None) -> None:
        """Create the folder in ``parent`` or in the temporary folder, and remove abandoned folders there."""
        for folder in Path(parent or tempfile.gettempdir()).glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError):  # it belongs to another user, or was removed meanwhile
                if _is_abandoned(folder):
                    shutil.rmtree(folder, ignore_errors=True)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        self._lock: int | None = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        _try_lock(self._lock)

    def remove(self) -> None:
        """Remove the folder; do nothing the second time."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None


def _is_abandoned(folder: Path) -> bool:
    """Whether no process holds the folder's lock."""
    lock = folder / _LOCK
    if folder.is_symlink() or not lock.is_file():
        return False
    if time.time() - lock.stat().st_mtime < _YOUNG_S:
        return False
    descriptor = os.open(lock, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
    try:
        return _try_lock(descriptor)
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    """Try to take the lock. The result is also False if files cannot be locked (Windows, some network file systems)."""
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError):
        return False
    return True
