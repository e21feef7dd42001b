"""Learning-rate schedules."""

from __future__ import annotations

import math
from typing import Literal

LRSchedule = Literal["constant", "linear", "cosine"]


def learning_rate_at(
    step: int,
    *,
    peak: float,
    total_steps: int,
    schedule: LRSchedule = "constant",
    warmup_steps: int = 0,
    min_ratio: float = 0.0,
) -> float:
    """Learning rate of optimizer step ``step`` (from 0) out of ``total_steps``.

    Rises linearly over ``warmup_steps`` (the first step already learns: peak / warmup_steps), then falls from ``peak``
    towards ``min_ratio · peak``, which the step after the last would reach.

    Raises:
        ValueError: unknown ``schedule``.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    if schedule == "constant":
        share = 1.0
    elif schedule == "linear":
        share = 1.0 - progress
    elif schedule == "cosine":
        share = (1.0 + math.cos(math.pi * progress)) / 2
    else:
        raise ValueError(f"schedule is {schedule!r}: expected 'constant', 'linear' or 'cosine'")
    return peak * (min_ratio + (1.0 - min_ratio) * share)
