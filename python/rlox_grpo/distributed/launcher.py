"""End a rank when its launcher has died. Ranks outlive a killed torchrun and would keep the run's folder locked."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from rlox_grpo.errors import RankError

LAUNCHER_VARIABLE = "RLOX_GRPO_LAUNCHER"
"""Set to ``ray`` in ranks that Ray started, so that a run file with Ray options does not start another set of ranks."""

LAUNCHED_BY = ("TORCHELASTIC_RUN_ID", "CROSS_RANK", LAUNCHER_VARIABLE)
"""Variables that torchrun, the deepspeed launcher and Ray's actors set. If none of these is set, no launcher is
watched."""

EVERY_S = 0.5
"""Seconds between two checks of the parent process."""
GRACE_S = 20.0
"""Seconds to finish the current step and save before the process is killed."""

_parent = os.getppid()  # the launcher: read on import, as it may be gone by the time that the ranks join
_watching = threading.Event()


def end_with_launcher() -> None:
    """Watch the launcher in a thread. The call does nothing without a launcher, or if it is repeated.

    When the launcher ends, the process gets SIGTERM, which makes a run save and stop. If it still runs after
    ``GRACE_S`` seconds, for example because it hangs in a collective, it exits with status 1.

    Raises:
        RankError: the launcher ended while this process imported its modules.
    """
    if os.name != "posix" or _watching.is_set() or not any(name in os.environ for name in LAUNCHED_BY):
        return
    if _parent == 1 and not _may_be_launcher(Path("/proc/1/cmdline")):
        raise RankError("the launcher of this rank is gone: start the run again")
    _watching.set()
    threading.Thread(target=_watch, args=(_parent, os.getppid), name="rlox-grpo-launcher", daemon=True).start()


def _may_be_launcher(command_line: Path) -> bool:
    """Whether process 1, which adopts orphans, may be the launcher itself, as in a container that runs nothing else."""
    try:
        command = command_line.read_bytes()
    except OSError:  # no /proc
        return True
    return any(name in command for name in (b"python", b"torchrun", b"deepspeed", b"accelerate"))


def _forget_launcher() -> None:
    """Reset the state in a forked process, whose launcher is the process that forked it."""
    global _parent
    _parent = os.getppid()
    _watching.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_launcher)


def _watch(parent: int, current_parent: Callable[[], int]) -> None:
    while current_parent() == parent:
        time.sleep(EVERY_S)
    print(f"rlox-grpo: the launcher (process {parent}) is gone: stopping", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(1)
