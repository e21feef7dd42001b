"""How often a vision tower runs, and for how long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class TowerUse:
    """Counts the pictures that a vision tower reads, and the seconds of its forward passes, also in several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._has_run, self._pictures = False, 0
        self._seconds: list[Callable[[], float]] = []

    @contextmanager
    def measuring(self, pictures: int, device: Any) -> Iterator[None]:
        """Measure a forward pass over ``pictures`` on the torch ``device``. On a GPU, the host does not wait for it."""
        stop = _start_clock(device)
        yield
        read = stop()
        with self._lock:
            self._has_run = True
            self._pictures += pictures
            self._seconds.append(read)

    def take(self) -> dict[str, float]:
        """Return the metrics since the last call; empty before the tower has run for the first time.

        ``images/tower_pictures`` is the number of pictures that the tower read, and ``images/tower_seconds`` the time
        of its forward passes.
        """
        with self._lock:
            pictures, seconds = self._pictures, self._seconds
            self._pictures, self._seconds = 0, []
        if not self._has_run:
            return {}
        return {"images/tower_pictures": float(pictures), "images/tower_seconds": sum(read() for read in seconds)}


def _start_clock(device: Any) -> Callable[[], Callable[[], float]]:
    """Start a clock; return a function that stops it and returns a function that reads its seconds."""
    if device.type != "cuda":
        start = time.perf_counter()

        def stop_host() -> Callable[[], float]:
            seconds = time.perf_counter() - start
            return lambda: seconds

        return stop_host
    import torch

    make_event: Any = torch.cuda.Event
    first, last = (make_event(enable_timing=True) for _ in range(2))
    first.record()

    def stop_device() -> Callable[[], float]:
        last.record()

        def read() -> float:
            last.synchronize()
            return float(first.elapsed_time(last)) / 1000

        return read

    return stop_device
