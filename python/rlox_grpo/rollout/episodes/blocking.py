"""Async environments that block the event loop of the episodes."""

from __future__ import annotations

import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BLOCKED_SECONDS = 60.0
"""Seconds after which an event loop that runs code of an environment, and nothing else, is reported as blocked."""

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_PACKAGE = str(Path(__file__).parents[2])


class LoopBlockedError(RuntimeError):
    """Code of an async environment blocks the event loop, so a call to its endpoint is never answered."""


class EnvironmentTime:
    """Measures how long the event loop has been running code of environments without a pause.

    A call to an endpoint is answered in the event loop. An async function that makes the call by a sync client waits
    for the answer in the event loop itself, so that neither goes on.
    """

    def __init__(self) -> None:
        """Prepare, in the thread of the event loop."""
        self._thread = threading.get_ident()
        self._since: float | None = None

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Measure an ``await`` in which environments run, and which returns within a second if none blocks."""
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._since = None

    def refuse_blocked(self) -> None:
        """Raise LoopBlockedError if one piece of code has run for BLOCKED_SECONDS; from any thread."""
        since = self._since
        if since is not None and time.monotonic() - since > BLOCKED_SECONDS:
            raise LoopBlockedError(
                f"an async environment has blocked the event loop for {BLOCKED_SECONDS:g} s{self._describe_line()}, so "
                "this call cannot be answered: await the call (openai.AsyncOpenAI in place of openai.OpenAI), or write "
                "the environment as a sync function (def), which runs in a thread of its own"
            )

    def _describe_line(self) -> str:
        """Return the line of the environment that runs now, such as ``, at agent.py:12 in solve``; "" if unknown."""
        frame = sys._current_frames().get(self._thread)
        for line in reversed(traceback.extract_stack(frame) if frame is not None else []):
            if not line.filename.startswith((*_LIBRARIES, _PACKAGE)):
                return f", at {line.filename}:{line.lineno} in {line.name}"
        return ""
