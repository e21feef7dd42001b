"""One run at a time in a folder: a kernel lock on the file ``.lock``, which ends with the process that holds it."""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rlox_grpo.errors import CheckpointError

if TYPE_CHECKING:
    from rlox_grpo.distributed.ranks import Ranks

LOCK_FILE = ".lock"

WITHOUT_LOCK = "RLOX_GRPO_NO_LOCK"
"""Environment variable: 1 trains without a lock, on a file system that has none."""

_NO_LOCKS_HERE = {getattr(errno, name) for name in ("ENOLCK", "ENOSYS", "EOPNOTSUPP", "EINVAL") if hasattr(errno, name)}

_guard = threading.Lock()
_held_here: set[str] = set()
"""Folders that this process holds. POSIX locks do not exclude two threads of one process."""


@contextmanager
def hold_run_folder(output_dir: str | None, ranks: Ranks) -> Iterator[None]:
    """Hold the run's folder for the block, on rank 0; a run without a folder holds nothing.

    Raises:
        CheckpointError: another run holds the folder, named by process and host; the folder cannot be made or written;
            or its file system has no locks.
    """
    if output_dir is None or not ranks.is_first:
        yield
        return
    folder = _made(Path(output_dir))
    with hold_folder(folder):
        yield


@contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Hold an existing ``folder`` for the block.

    The lock is ``fcntl.lockf`` (POSIX), not ``flock`` as in the filelock package: a process that was forked off, such
    as a worker of a reward function, does not inherit it and so cannot keep it after the run was killed. NFS has it
    too. The file stays, as removing it would let two runs lock two files of one name.

    Raises:
        CheckpointError: as :func:`hold_run_folder`.
    """
    real = os.path.realpath(folder)
    with _guard:
        if real in _held_here:
            raise CheckpointError(
                f"output_dir={str(folder)!r} is in use by another trainer in this process ({os.getpid()}): "
                "wait for it, or choose another output_dir"
            )
        _held_here.add(real)
    try:
        descriptor = _open(folder)
        try:
            if os.environ.get(WITHOUT_LOCK) != "1":
                _lock(descriptor, folder)
            os.ftruncate(descriptor, 0)
            os.write(descriptor, _describe_this_process())
            yield
        finally:
            os.close(descriptor)  # gives up the lock
    finally:
        with _guard:
            _held_here.discard(real)


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise CheckpointError(f"output_dir={str(folder)!r} is a file: choose the path of a folder") from None
    except OSError as error:
        raise CheckpointError(
            f"output_dir={str(folder)!r} cannot be made ({error.strerror}): choose a folder that you may write"
        ) from None
    return folder


def _open(folder: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
    try:
        return os.open(folder / LOCK_FILE, flags, 0o666)
    except OSError as error:
        raise CheckpointError(
            f"output_dir={str(folder)!r} cannot be written ({LOCK_FILE}: {error.strerror}): "
            "choose a folder that you may write"
        ) from None


def _lock(descriptor: int, folder: Path) -> None:
    try:
        _lock_file(descriptor)
    except OSError as error:
        if error.errno in _NO_LOCKS_HERE:
            raise CheckpointError(
                f"the file system of output_dir={str(folder)!r} has no file locks ({error.strerror}), so nothing would "
                "stop a second run in this folder. Choose an output_dir on another file system, or set "
                f"{WITHOUT_LOCK}=1 and start only one run in it"
            ) from None
        raise CheckpointError(
            f"output_dir={str(folder)!r} is in use by another run{_holder(folder)}: wait for it, stop it, or choose "
            "another output_dir"
        ) from None


def _lock_file(descriptor: int) -> None:
    """Lock the file without waiting. Raises OSError."""
    if sys.platform == "win32":
        import msvcrt

        os.lseek(descriptor, 2**30, os.SEEK_SET)  # a locked byte cannot be read: lock one past the text
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        os.lseek(descriptor, 0, os.SEEK_SET)
    else:
        import fcntl

        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _describe_this_process() -> bytes:
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    return json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": now}).encode() + b"\n"


def _holder(folder: Path) -> str:
    """The process that wrote the lock file, in words; empty where the file says nothing."""
    try:
        said = json.loads((folder / LOCK_FILE).read_bytes()[:4096])
        return f" (process {int(said['pid'])} on host {str(said['host'])[:200]}, since {str(said['since'])[:40]})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""
