"""The run folder: its lock, the checkpoint to resume from, and removal of what was logged after that checkpoint."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import shutil
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from rlox_grpo.distributed.ranks import Ranks
from rlox_grpo.distributed.shards import find_whole_shape
from rlox_grpo.errors import CheckpointError
from rlox_grpo.run.files import (
    append_line,
    cut_after,
    json_line,
    list_completions,
    read_jsonl,
    remove_temporary_files,
    replace_file,
    set_broken_lines_aside,
)
from rlox_grpo.run.history import (
    checkpoints,
    choose_newest,
    remove_leftovers,
    require_good,
    set_aside,
    set_later_aside,
)

logger = logging.getLogger(__name__)


def agree_on_checkpoint(ranks: Ranks, folder: Path | None, resume: str) -> tuple[Path | None, list[Path]]:
    """Find on rank 0 the checkpoint to resume from, if any, and the newer ones that are damaged; return it everywhere.

    All ranks must see the same folder.

    Raises:
        CheckpointError: on every rank: the named checkpoint or every checkpoint is damaged, ``resume="never"`` and
            the folder has checkpoints, or the named checkpoint is of another folder and this one holds a run.
    """
    path: Path | None = None
    damaged: list[Path] = []
    trouble = ""
    if ranks.is_first:
        try:
            if resume not in ("auto", "never"):
                path = Path(resume)
                require_good(path)
                if folder is not None:
                    _refuse_other_run(folder, path)
            elif folder is not None:
                root = folder / "checkpoints"
                if resume == "never" and checkpoints(root):
                    raise CheckpointError(f"{folder} holds a run and resume='never': choose another output_dir")
                path, damaged = choose_newest(root)
        except CheckpointError as error:
            trouble = str(error)
    newest, broken, trouble = ranks.gather([str(path or ""), [str(path) for path in damaged], trouble])[0]
    if trouble:
        raise CheckpointError(trouble)
    return Path(newest) if newest else None, [Path(path) for path in broken]


def _refuse_other_run(folder: Path, checkpoint: Path) -> None:
    """Raise CheckpointError if ``folder`` holds a run that ``checkpoint`` is not of: its files would be removed."""
    root = folder / "checkpoints"
    if checkpoint.resolve().parent == root.resolve():
        return
    if checkpoints(root) or (folder / "metrics.jsonl").exists():
        raise CheckpointError(
            f"resume={str(checkpoint)!r} is not a checkpoint of output_dir={str(folder)!r}, which holds another run: "
            "choose a new output_dir, or resume='auto'"
        )


def name_newest(folder: Path) -> str:
    """Return the path of the newest checkpoint, or text that says there is none."""
    listed = checkpoints(folder / "checkpoints")
    return str(listed[-1]) if listed else "the start: no checkpoint was written yet"


def refuse_full_disk(folder: Path, model: nn.Module, masters: Mapping[str, Tensor] = MappingProxyType({})) -> None:
    """Raise CheckpointError if the disk of ``folder`` has no room for two checkpoints.

    ``masters`` are the float32 weights of parameters that ``model`` holds rounded, by name.
    """
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    # Weights and the two moments of AdamW. A new checkpoint is complete before an old one is removed.
    checkpoint_bytes = 3 * sum(
        math.prod(find_whole_shape(parameter)) * masters.get(name, parameter).element_size()
        for name, parameter in trainable.items()
    )
    free = shutil.disk_usage(folder).free
    if free < 2 * checkpoint_bytes:
        raise CheckpointError(
            f"{folder} has {free:,} bytes free, and two checkpoints take {2 * checkpoint_bytes:,}: free space or "
            "choose another output_dir"
        )


def prepare_folder(
    folder: Path,
    step: int,
    *,
    resumes: bool,
    damaged: Sequence[Path],
    changed: Mapping[str, tuple[Any, Any]],
    config: str,
) -> None:
    """Remove what the folder has of steps after ``step``, rename later checkpoints, and write ``config.toml``.

    Args:
        step: the step that the run starts from.
        resumes: whether it starts from a checkpoint.
        damaged: checkpoints to rename.
        changed: options that differ from the checkpoint's: name → (old value, new value).
        config: content of ``config.toml``.
    """
    root = folder / "checkpoints"
    remove_leftovers(root)
    for directory in (folder, folder / "completions"):
        remove_temporary_files(directory)
    for path in damaged:
        logger.warning("the damaged checkpoint is now %s", set_aside(path, "damaged"))
    done = step or -1  # a new run also repeats the evaluation of step 0
    later = [path for path, file_step in list_completions(folder).items() if file_step > done]
    for path in later:
        path.unlink(missing_ok=True)
    if later:
        logger.info("%s: removed the completions of %d steps after %d", folder, len(later), step)
    if resumes:
        for name in ("metrics.jsonl", "evaluations.jsonl", "warnings.jsonl", "changes.jsonl"):
            set_broken_lines_aside(folder / name)
        for path in list_completions(folder):
            set_broken_lines_aside(path)
        for path in set_later_aside(root, step):
            logger.warning("the run continues from step %d; the later checkpoint is now %s", step, path)
        measured = folder / "metrics.jsonl"
        recorded = max((row["step"] for row in read_jsonl(measured)), default=0) if measured.exists() else 0
        if recorded < step:
            logger.warning("%s ends at step %d: the steps up to %d are lost", measured, recorded, step)
    replace_file(folder / "config.toml", config.encode())
    cut_after(folder / "evaluations.jsonl", done)
    if changed:
        values = {name: [old, new] for name, (old, new) in changed.items()}
        append_line(folder / "changes.jsonl", json_line({"step": step, "time": time.time(), "changed": values}))
        changes = ", ".join(f"{name}={new!r}" for name, (_, new) in changed.items())
        logger.info("options changed at step %d: %s", step, changes)


LOCK_FILE = ".lock"

WITHOUT_LOCK = "RLOX_GRPO_NO_LOCK"
"""Environment variable: 1 trains without a lock, for file systems without file locks."""

_NO_LOCKS_HERE = {getattr(errno, name) for name in ("ENOLCK", "ENOSYS", "EOPNOTSUPP", "EINVAL") if hasattr(errno, name)}
_LOCKED = {getattr(errno, name) for name in ("EAGAIN", "EACCES", "EDEADLK", "EDEADLOCK") if hasattr(errno, name)}

_guard = threading.Lock()
_held_here: dict[str, int] = {}
"""Descriptor of the lock file of each folder that this process has locked."""


def _close_in_child() -> None:
    """Close the lock files in a forked process, which shares their locks and may outlive a run that is killed."""
    for descriptor in _held_here.values():
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held_here.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


@contextmanager
def hold_run_folder(output_dir: str | None, ranks: Ranks) -> Iterator[None]:
    """Lock the run folder during the block, on rank 0; create the folder first. Without a folder, do nothing.

    Raises:
        CheckpointError: another run has the lock (the message names its process and host), the folder cannot be
            created or written, or its file system has no file locks.
    """
    if output_dir is None or not ranks.is_first:
        yield
        return
    try:
        Path(output_dir).mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise CheckpointError(f"output_dir={output_dir!r} is a file: choose the path of a folder") from None
    except OSError as error:
        raise CheckpointError(
            f"output_dir={output_dir!r} cannot be made ({error.strerror}): choose a folder that you may write"
        ) from None
    with hold_folder(Path(output_dir)):
        yield


@contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Lock an existing ``folder`` during the block, by a kernel lock on its file ``.lock``.

    The kernel releases the lock when the process ends. The lock belongs to the open file, and not to the process as a
    POSIX lock of ``fcntl.lockf`` does: the kernel gives that one up as soon as anything in the process opens and closes
    the file, such as a callback that copies the folder. Forked processes share the open file, so they close it first:
    a worker that outlives a killed run does not keep the lock. The file is never removed: otherwise two runs could lock
    two files of the same name.

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
        descriptor = _held_here[real] = _open(folder)
    try:
        if os.environ.get(WITHOUT_LOCK) != "1":
            _lock(descriptor, folder)
        os.ftruncate(descriptor, 0)
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        os.write(descriptor, json_line({"pid": os.getpid(), "host": socket.gethostname(), "since": now}))
        yield
    finally:
        with _guard:
            if _held_here.pop(real, None) == descriptor:  # a forked process has closed it
                os.close(descriptor)  # gives up the lock


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
        if error.errno not in _LOCKED:
            raise CheckpointError(
                f"output_dir={str(folder)!r} cannot be locked ({error.strerror}): choose an output_dir on another "
                "file system"
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

        set_lock = getattr(fcntl, "F_OFD_SETLK", None)  # Linux; it works on NFS too
        if set_lock is not None:
            # struct flock: l_type, l_whence, l_start, l_len (0: to the end), l_pid
            whole = struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            try:
                fcntl.fcntl(descriptor, set_lock, whole)
                return
            except OSError as error:
                if error.errno != errno.EINVAL:  # a system that does not know this call
                    raise
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _holder(folder: Path) -> str:
    """Describe the process that wrote the lock file; empty if the file cannot be read."""
    try:
        said = json.loads((folder / LOCK_FILE).read_bytes()[:4096])
        return f" (process {int(said['pid'])} on host {str(said['host'])[:200]}, since {str(said['since'])[:40]})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""
