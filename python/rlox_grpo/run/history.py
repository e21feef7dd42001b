"""The checkpoints of a run folder: choose one to resume from or to restore, and remove old ones."""

from __future__ import annotations

import logging
import math
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from rlox_grpo.errors import CheckpointError
from rlox_grpo.run.files import open_regular, replace_file
from rlox_grpo.run.guards import LAST
from rlox_grpo.run.manifest import find_damage, read_write_time

logger = logging.getLogger(__name__)

_NAME = re.compile(r"step_(\d{6,})")
_PARTIAL = ".writing_"
_GOING_BACK = "going_back_to"
"""Name of the file that holds the step of :func:`set_later_aside` while it renames checkpoints."""


def checkpoint_path(root: Path, step: int) -> Path:
    """Return the path of the checkpoint of ``step``, which need not exist."""
    return root / f"step_{step:06d}"


def checkpoints(root: Path) -> list[Path]:
    """Return the complete checkpoints under ``root``, sorted by step, without renamed ones."""
    if not root.is_dir():
        return []
    return sorted(
        (path for path in root.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()), key=checkpoint_step
    )


def checkpoint_step(checkpoint: Path) -> int:
    """Return the step in the name of a checkpoint."""
    match = _NAME.fullmatch(checkpoint.name)
    return int(match[1]) if match else 0


def partial_path(checkpoint: Path) -> Path:
    """Return a unique temporary path beside ``checkpoint``, for writing or removing it."""
    return checkpoint.with_name(f"{_PARTIAL}{checkpoint.name}.{os.urandom(6).hex()}")


def remove_leftovers(root: Path) -> None:
    """Remove incomplete checkpoints of killed processes. The process must hold the lock of the run folder."""
    for torn in root.glob(f"{_PARTIAL}*"):
        logger.info("removing the incomplete checkpoint %s", torn)
        shutil.rmtree(torn, ignore_errors=True)


def remove_old(root: Path, *, keep: int, newest: Path, best: Path | None = None) -> None:
    """Remove all but the ``keep`` checkpoints that were written last. ``newest`` and ``best`` are always kept."""
    others = sorted((path for path in checkpoints(root) if path != newest), key=read_write_time)
    for old in others[: max(0, len(others) - (keep - 1))]:
        if old == best:
            continue
        # Rename it first: a kill during the removal must not leave half a checkpoint that a resume would read.
        gone = partial_path(old)
        try:
            os.replace(old, gone)
        except OSError as error:
            logger.warning("the old checkpoint %s cannot be removed: %s", old, error)
            continue
        shutil.rmtree(gone, ignore_errors=True)


def set_aside(checkpoint: Path, why: str) -> Path:
    """Rename a checkpoint to ``<name>.<why>-<time>``, so that no run resumes from it. Raises OSError."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    target = checkpoint.with_name(f"{checkpoint.name}.{why}-{stamp}")
    number = 1
    while target.exists():
        number += 1
        target = checkpoint.with_name(f"{checkpoint.name}.{why}-{stamp}-{number}")
    os.replace(checkpoint, target)
    return target


def set_later_aside(root: Path, step: int) -> list[Path]:
    """Rename the checkpoints after ``step``, from which the run does not continue.

    A file records the step until all checkpoints are renamed. After a kill in between, :func:`choose_newest` ignores
    the checkpoints that were not renamed yet.

    Raises:
        CheckpointError: a checkpoint cannot be renamed.
    """
    moved = []
    later = [path for path in checkpoints(root) if checkpoint_step(path) > step]
    try:
        if later:
            replace_file(root / _GOING_BACK, str(step).encode())
        for path in later:
            moved.append(set_aside(path, "superseded"))
        (root / _GOING_BACK).unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot rename the checkpoints after step {step} of {root}: {error}") from error
    return moved


def _read_last_step(root: Path) -> float:
    """Return the step of an interrupted :func:`set_later_aside`; infinity if there is none."""
    try:
        with open_regular(root / _GOING_BACK, max_bytes=32) as file:
            return int(file.read())
    except FileNotFoundError:
        return math.inf
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{root / _GOING_BACK} is damaged ({error}): the run was going back to an earlier checkpoint; name it by "
            "resume=<checkpoint>"
        ) from error


def newest_good(
    root: Path, before: float = math.inf, fits: Callable[[Path], bool] = lambda checkpoint: True
) -> Path | None:
    """Return the newest checkpoint without damage that ``fits``, of step ``before`` or earlier; None without one."""
    earlier = [path for path in checkpoints(root) if checkpoint_step(path) <= before]
    return next((path for path in reversed(earlier) if not find_damage(path) and fits(path)), None)


def choose_newest(root: Path) -> tuple[Path | None, list[Path]]:
    """Return the checkpoint that ``resume="auto"`` continues from, and the newer ones, which are damaged.

    Raises:
        CheckpointError: every checkpoint is damaged; the message describes the damage of each.
    """
    broken: list[tuple[Path, str]] = []
    last_step = _read_last_step(root)
    for checkpoint in reversed([path for path in checkpoints(root) if checkpoint_step(path) <= last_step]):
        damage = find_damage(checkpoint)
        if not damage:
            for path, what in broken:
                logger.warning("%s is damaged (%s): resuming from %s instead", path, what, checkpoint)
            return checkpoint, [path for path, _ in broken]
        broken.append((checkpoint, damage))
    if not broken:
        return None, []
    each = "; ".join(f"{path.name}: {what}" for path, what in broken)
    raise CheckpointError(
        f"no checkpoint under {root} can be continued ({each}): restore one, or choose another output_dir to start anew"
    )


def require_good(checkpoint: Path) -> None:
    """Raise CheckpointError if ``checkpoint`` is damaged. The message names the newest checkpoint without damage."""
    if damage := find_damage(checkpoint):
        for root in (checkpoint, checkpoint / "checkpoints"):
            if good := newest_good(root):
                raise CheckpointError(
                    f"{checkpoint} is not a checkpoint, but the folder of several: the newest good one is {good}"
                )
        good = newest_good(checkpoint.parent)
        beside = f"the newest good checkpoint beside it is {good}" if good else "there is no good checkpoint beside it"
        raise CheckpointError(f"{checkpoint} is damaged or not a checkpoint of rlox_grpo: {damage}; {beside}")


LEAST_FACTOR = 1 / 32
"""Each restore halves the learning rate. If the reward still collapses after five, the learning rate is no cause."""


def choose_restore(folder: Path, step: int, factor: float, fits: Callable[[Path], bool]) -> Path | None:
    """Return the newest checkpoint from before the collapse of the reward; None if there is none. Logs the choice.

    ``factor`` is the current factor of the learning rate. ``fits`` says whether a checkpoint is of the prompts and
    options of this call of ``train``.
    """
    if factor <= LEAST_FACTOR:
        logger.warning("the reward has collapsed again, at %g of the learning rate: training continues", factor)
        return None
    before = step - LAST  # the guard compares the last LAST steps with the steps before them
    newest = newest_good(folder / "checkpoints", before, fits)
    if newest is None:
        logger.warning(
            "the reward has collapsed, and no checkpoint of step %d or earlier that fits this call of train is left to "
            "restore: training continues; lower checkpoint_steps or raise keep_checkpoints",
            before,
        )
    else:
        logger.warning(
            "the reward has collapsed at step %d: restoring %s and continuing with %g of the learning rate",
            *(step, newest, factor / 2),
        )
    return newest
