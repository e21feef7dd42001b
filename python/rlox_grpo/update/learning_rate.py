"""Learning-rate schedules."""

from __future__ import annotations

import math

from rlox_grpo.config.records.update import OptimizerConfig


def learning_rate_at(step: int, total_steps: int, config: OptimizerConfig) -> float:
    """Return the learning rate of step ``step`` (from 0) out of ``total_steps``.

    It rises linearly over ``warmup_steps`` (the first step has ``learning_rate / warmup_steps``), then falls from
    ``learning_rate`` towards ``min_lr_ratio · learning_rate``, which the step after the last would reach.
    """
    peak, warmup_steps = config.learning_rate, config.warmup_steps
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    if config.lr_schedule == "constant":
        share = 1.0
    elif config.lr_schedule == "linear":
        share = 1.0 - progress
    else:
        share = (1.0 + math.cos(math.pi * progress)) / 2
    return peak * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * share)
