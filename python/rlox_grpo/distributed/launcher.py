"""End a rank when its launcher is gone: a killed torchrun leaves its ranks running, and they hold the run's folder."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

LAUNCHED_BY = ("TORCHELASTIC_RUN_ID", "CROSS_RANK")
"""Variables that torchrun and the deepspeed launcher set. A rank that a shell started may outlive the shell."""

EVERY_S = 0.5
"""Seconds between two looks at the parent process."""
GRACE_S = 20.0
"""Seconds to finish the current step and save, after which the process is ended."""

_watching = threading.Event()


def end_with_launcher() -> None:
    """Watch the launcher from a thread, once in a process; does nothing where no launcher started it.

    When the launcher is gone the process gets SIGTERM, which a run takes as the wish to save and stop; a process that
    lives ``GRACE_S`` longer, such as one that hangs in a collective, exits with status 1.
    """
    if os.name != "posix" or _watching.is_set() or not any(name in os.environ for name in LAUNCHED_BY):
        return
    _watching.set()
    parent = os.getppid()
    threading.Thread(target=_watch, args=(parent, os.getppid), name="rlox-grpo-launcher", daemon=True).start()


def _watch(parent: int, current_parent: Callable[[], int]) -> None:
    while current_parent() == parent:
        time.sleep(EVERY_S)
    print(f"rlox-grpo: the launcher (process {parent}) is gone: stopping", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(1)
