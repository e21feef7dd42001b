"""A run's folder: its lock, the checkpoint to continue from, and files cut to that checkpoint's step."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from rlox_grpo.distributed.ranks import Ranks
from rlox_grpo.errors import CheckpointError
from rlox_grpo.run.checkpoint import read_state
from rlox_grpo.run.files import (
    append_line,
    cut_after,
    json_line,
    last_step,
    list_completions,
    remove_later_completions,
    remove_parts,
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
from rlox_grpo.run.manifest import find_damage
from rlox_grpo.run.resume import find_state_damage

if TYPE_CHECKING:
    from rlox_grpo.distributed.ranks import Ranks

logger = logging.getLogger(__name__)


def find_checkpoint(folder: Path | None, resume: str) -> tuple[Path | None, list[Path]]:
    """Find the checkpoint to continue from, if any, and the damaged ones that are newer.

    Raises:
        CheckpointError: The named checkpoint is damaged, every checkpoint is, or ``never`` meets a run.
    """
    if resume not in ("auto", "never"):
        require_good(Path(resume), _find_damage)
        return Path(resume), []
    if folder is None:
        return None, []
    root = folder / "checkpoints"
    if resume == "never" and checkpoints(root):
        raise CheckpointError(f"{folder} holds a run and resume='never': choose another output_dir")
    return choose_newest(root, _find_damage)


def agree_on_checkpoint(
    ranks: Ranks, folder: Path | None, resume: str, *, holds_step: bool
) -> tuple[Path | None, list[Path]]:
    """What :func:`find_checkpoint` returns on rank 0, on every rank; nothing where the trainer ``holds_step`` of a run.

    Rank 0 writes the folder; the others must be able to read it.

    Raises:
        CheckpointError: as :func:`find_checkpoint`, on every rank.
    """
    path: Path | None = None
    damaged: list[Path] = []
    trouble = ""
    if ranks.is_first and not holds_step:
        try:
            path, damaged = find_checkpoint(folder, resume)
        except CheckpointError as error:
            trouble = str(error)
    found, broken, trouble = ranks.gather([str(path or ""), [str(one) for one in damaged], trouble])[0]
    if trouble:
        raise CheckpointError(trouble)
    return Path(found) if found else None, [Path(one) for one in broken]


def _find_damage(checkpoint: Path) -> str:
    """Describe what is wrong with a checkpoint: its files, else its state."""
    return find_damage(checkpoint) or find_state_damage(read_state(checkpoint))


def name_newest(folder: Path | None) -> str:
    """The newest checkpoint's path, or words for none."""
    found = [] if folder is None else checkpoints(folder / "checkpoints")
    return str(found[-1]) if found else "the start: no checkpoint was written yet"


def advise_resume(folder: Path | None, resume: str, *, numbers_are_bad: bool) -> str:
    """Tell the user of a run that stopped how to continue it.

    Args:
        folder: The run's folder, if it has one.
        resume: The option.
        numbers_are_bad: Values were not finite, so the same command would meet them again.
    """
    if folder is None:
        return "nothing was saved: the run has no output_dir; in this process, the same call of train() continues"
    saved = f"saved up to {name_newest(folder)}"
    if numbers_are_bad:
        return (
            f"{saved}; the same command would meet the same numbers again: continue with another learning rate "
            "(learning_rate=…, resume_changes=['learning_rate']) or max_grad_norm, or change what the error names"
        )
    if resume not in ("auto", "never"):
        return f"{saved}; start again with resume='auto' to continue (resume={resume!r} goes back to it)"
    return f"{saved}; start the same command again to continue (in a notebook: run the cell again)"


def refuse_full_disk(folder: Path, model: nn.Module) -> None:
    """Raise CheckpointError if two checkpoints do not fit on the disk of ``folder``."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    one = 3 * sum(parameter.numel() * parameter.element_size() for parameter in trainable)  # weights, two moments
    free = shutil.disk_usage(folder).free
    if free < 2 * one:
        raise CheckpointError(
            f"{folder} has {free / 2**20:.0f} MiB free, and writing one checkpoint beside another takes "
            f"{2 * one / 2**20:.0f} MiB: free space or choose another output_dir"
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
    """Cut the folder's files to ``step``, set later checkpoints aside, and write ``config.toml``.

    Args:
        folder: The run's folder.
        step: The step that the run starts from.
        resumes: Whether it starts from a checkpoint.
        damaged: Damaged checkpoints, which are set aside.
        changed: Options that differ from the checkpoint's, each with its old and its new value.
        config: The content of ``config.toml``.
    """
    root = folder / "checkpoints"
    remove_leftovers(root)
    for place in (folder, folder / "completions"):
        remove_parts(place)
    for path in damaged:
        logger.warning("the damaged checkpoint is now %s", set_aside(path, "damaged"))
    remove_later_completions(folder, step or -1)  # a run that starts anew evaluates its step 0 anew
    if resumes:
        for name in ("metrics.jsonl", "evaluations.jsonl", "warnings.jsonl", "changes.jsonl"):
            set_broken_lines_aside(folder / name)
        for path in list_completions(folder):
            set_broken_lines_aside(path)
        for path in set_later_aside(root, step):
            logger.warning("the run goes back to step %d; the later checkpoint is now %s", step, path)
        recorded = last_step(folder / "metrics.jsonl")
        if recorded < step:
            logger.warning("%s ends at step %d: the steps up to %d are lost", folder / "metrics.jsonl", recorded, step)
    replace_file(folder / "config.toml", config.encode())
    cut_after(folder / "evaluations.jsonl", step or -1)
    if changed:
        values = {name: [old, new] for name, (old, new) in changed.items()}
        append_line(folder / "changes.jsonl", json_line({"step": step, "time": time.time(), "changed": values}))
        changes = ", ".join(f"{name}={new!r}" for name, (_, new) in changed.items())
        logger.info("options changed at step %d: %s", step, changes)


LOCK_FILE = ".lock"

WITHOUT_LOCK = "RLOX_GRPO_NO_LOCK"
"""Environment variable: 1 trains without a lock, on a file system that has none."""

_NO_LOCKS_HERE = {getattr(errno, name) for name in ("ENOLCK", "ENOSYS", "EOPNOTSUPP", "EINVAL") if hasattr(errno, name)}
_LOCKED = {getattr(errno, name) for name in ("EAGAIN", "EACCES", "EDEADLK", "EDEADLOCK") if hasattr(errno, name)}

_guard = threading.Lock()
_held_here: set[str] = set()
"""Folders that this process holds. POSIX locks do not exclude two threads of one process."""


@contextmanager
def hold_run_folder(output_dir: str | None, ranks: Ranks) -> Iterator[None]:
    """Hold the run's folder for the block, on rank 0; a run without a folder holds nothing.

    By a kernel lock on the file ``.lock``, which ends with the process that holds it.

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
