"""What applies the gradient: one protocol, several updaters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from rlox_grpo.types import Batch, LossOutput, UpdateStats

LossFn = Callable[[Tensor, Batch], LossOutput]
"""Log-probs ``[N, T]`` and their micro-batch → loss."""


@runtime_checkable
class Updater(Protocol):
    """Takes optimizer steps on the policy it was made with."""

    def step(self, batches: Sequence[Batch], learning_rate: float) -> UpdateStats:
        """One optimizer step over micro-batches that share their denominators.

        Raises:
            NonFiniteError: the loss or the gradient is not finite; no weight has changed.
        """
        ...

    def state_dict(self) -> Mapping[str, Any]:
        """What a checkpoint must hold beside the weights: tensors by name, and plain JSON values."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what ``state_dict`` gave."""
        ...
