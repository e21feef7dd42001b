"""Resource use of a step: time by stage, tokens, and peak memory of this process."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

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


Lap: TypeAlias = tuple[str, float, float]
"""A run of a stage: its name, and the seconds from the start of the step to the begin and to the end of the run."""


class StageClock:
    """Measures when the stages of a step begin and end. A stage may run several times."""

    def __init__(self) -> None:
        self._laps: list[Lap] = []
        self._start = time.perf_counter()

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Time the block as ``stage``."""
        start = time.perf_counter()
        yield
        self._laps.append((stage, start - self._start, time.perf_counter() - self._start))

    def read(self) -> list[Lap]:
        """Return the runs of all stages in order, and as ``step`` the time since the clock was created."""
        return [*self._laps, ("step", 0.0, time.perf_counter() - self._start)]


def add_laps(ranks: Sequence[Sequence[Lap]]) -> dict[str, float]:
    """Return the seconds of each stage, and of the whole ``step``, from the laps of all ranks.

    A stage lasts from the begin to the end of the last rank. A rank that waits for a slower one in the next stage, at
    a collective, thus adds nothing to that stage, and the stages add up to the time of the step.

    Args:
        ranks: for each rank the result of :meth:`StageClock.read`; all have the same stages in the same order. The
            ranks start a step together.
    """
    # Example: rollouts of 1 s and 9 s, then rewards of 1 s, which end with a collective. The laps of rewards are 1 to
    # 10 and 9 to 10, so the rollout has 9 s and the rewards 1 s; the first rank's own 9 s of rewards are a wait.
    seconds: dict[str, float] = {}
    for laps in zip(*ranks, strict=True):
        stage = laps[0][0]
        begin, end = (max(lap[side] for lap in laps) for side in (1, 2))
        seconds[stage] = seconds.get(stage, 0.0) + end - begin
    return seconds
