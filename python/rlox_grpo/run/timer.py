"""How long each stage of a step takes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class StageClock:
    """Seconds of each stage of a step; a stage that runs several times adds up."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Time the block as ``stage``."""
        start = time.perf_counter()
        yield
        self._seconds[stage] = self._seconds.get(stage, 0.0) + time.perf_counter() - start

    def timings(self) -> dict[str, float]:
        """Seconds by stage, and under ``step`` the wall clock since the beginning."""
        return {**self._seconds, "step": time.perf_counter() - self._start}
