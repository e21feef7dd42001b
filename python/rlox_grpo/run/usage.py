"""Resource use of a step: time by stage, tokens, and peak memory of this process."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from rlox_grpo.groups import count_sampled
from rlox_grpo.types import ScoredGroup

if sys.platform != "win32":
    import resource

_GIB = 2.0**30

PROMPT_TOKENS, COMPLETION_TOKENS = "tokens/prompt", "tokens/completion"
"""Names of the metrics with the tokens of all steps so far."""


def count_tokens(groups: Sequence[ScoredGroup]) -> tuple[int, int]:
    """Return the number of prompt tokens, counted once for each group, and of sampled tokens."""
    prompts = sum(len(scored.group.prompt.token_ids) for scored in groups)
    return prompts, sum(count_sampled(completion) for scored in groups for completion in scored.group.completions)


def measure_memory() -> dict[str, float]:
    """Return the peak memory of this process since its start, in GiB: host memory (not on Windows) and GPU memory."""
    metrics = {}
    if sys.platform != "win32":
        unit = 1.0 if sys.platform == "darwin" else 1024.0  # macOS reports bytes, Linux KiB
        metrics["perf/host_memory_gib_max"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / _GIB
    if torch.cuda.is_available():
        metrics["perf/gpu_memory_gib_max"] = torch.cuda.max_memory_allocated() / _GIB
    return metrics


class StageClock:
    """Measures the seconds of each stage of a step. Several runs of a stage are added."""

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
        """Return the seconds by stage, and as ``step`` the wall-clock time since the clock was created."""
        return {**self._seconds, "step": time.perf_counter() - self._start}
