"""An updater with the loss of its steps, for tests of what a whole optimizer step does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlox_grpo.trainer.step import take_optimizer_step
from rlox_grpo.types import Batch, LossOutput, UpdateStats


@dataclass
class Stepping:
    """Takes optimizer steps with one loss; everything else is the updater's."""

    updater: Any
    loss: Callable[..., LossOutput]

    def step(self, batches: Sequence[Batch], learning_rate: float) -> UpdateStats:
        """Take one step over the micro-batches."""
        return take_optimizer_step(self.updater, self.loss, batches, learning_rate)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.updater, name)
