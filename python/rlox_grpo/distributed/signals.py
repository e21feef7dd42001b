"""On Ctrl-C, SIGTERM or SIGHUP, finish the current step, then stop: no half-updated weights are saved."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

signalled = threading.Event()
"""Set when `stop_on_signal` has caught a signal. A launcher kills the process 30 s after its signal."""


class StopRequest:
    """Whether a stop was requested, and by which signal."""

    def __init__(self) -> None:
        self.name = ""
        """Name of the signal; empty before there is one."""

    def __bool__(self) -> bool:
        return bool(self.name)


_pending: list[StopRequest] = []
"""The requests of the blocks that the main thread is in, outermost first."""


@contextmanager
def stop_on_signal() -> Iterator[StopRequest]:
    """Turn the first SIGINT, SIGTERM or SIGHUP into a request to stop; a second SIGINT interrupts at once.

    A closed terminal sends SIGHUP; under ``nohup`` it stays ignored. Outside the main thread, signals cannot be caught
    and this does nothing. A block inside another one begins with the signal that the outer one has caught.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if request and number == signal.SIGINT:
            raise KeyboardInterrupt
        request.name = signal.Signals(number).name
        signalled.set()

    caught = [signal.SIGINT, signal.SIGTERM]
    hangup = getattr(signal, "SIGHUP", None)  # Windows has none
    if hangup is not None and signal.getsignal(hangup) is not signal.SIG_IGN:
        caught.append(hangup)
    if _pending:
        request.name = _pending[-1].name
    _pending.append(request)
    before = {number: signal.signal(number, handle) for number in caught}
    try:
        yield request
    finally:
        _pending.remove(request)
        for number, handler in before.items():
            signal.signal(number, handler)
