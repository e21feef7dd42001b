"""Metrics of a run in Ray's dashboard: the actor of rank 0 sets Ray gauges from the run's ``metrics.jsonl``.

Ray's agent on the node exports the gauges to Prometheus, the source of the dashboard's graphs.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

PREFIX = "rlox_grpo_"
SHOWN = re.compile(r"step|reward/mean|policy/kl|(engines|time|perf)/.*")
"""Metrics that are exported."""
LONGEST = 2**20
"""Maximum bytes read at a time."""

_ENGINE_METRIC = re.compile(r"engines/(\d+)/(.*)")


class DashboardGauges:
    """The gauges ``rlox_grpo_…`` of one run, with the tag ``run``, and ``engine`` for those of an engine."""

    def __init__(self, file: Path) -> None:
        self._file, self._read = file, 0
        self._gauges: dict[str, Any] = {}

    def follow(self) -> None:
        """Set the gauges to the values of the newest line, if one was written since the last call."""
        try:
            with self._file.open("rb") as file:
                size = file.seek(0, 2)
                if size == self._read:
                    return
                file.seek(max(0, size - LONGEST))
                lines = file.read(LONGEST).split(b"\n")
            self._read = size
            values = json.loads(lines[-2]) if len(lines) > 1 else {}  # the last one ends with the end of the line
        except (OSError, ValueError, RecursionError):
            return
        for name, value in values.items() if isinstance(values, dict) else ():
            if SHOWN.fullmatch(name) and isinstance(value, (int, float)) and not isinstance(value, bool):
                self._set(name, float(value))

    def _set(self, name: str, value: float) -> None:
        from ray.util.metrics import Gauge

        tags = {"run": self._file.parent.name}
        if engine := _ENGINE_METRIC.fullmatch(name):
            tags, name = {**tags, "engine": engine[1]}, f"engines/{engine[2]}"
        shown = PREFIX + re.sub(r"\W", "_", name, flags=re.ASCII)
        if shown not in self._gauges:
            self._gauges[shown] = Gauge(shown, f"{name} of the run's metrics", tag_keys=tuple(tags))
        self._gauges[shown].set(value, tags)
