"""The interface of an updater: what applies gradients to the policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from rlox_grpo.model.forward import Forward
from rlox_grpo.types import Batch, LossOutput, UpdateStats

LossFn = Callable[..., LossOutput]
"""``loss_fn(log_probs, batch, entropy=entropy)``, and ``distribution_kl`` where the forward gives one → loss."""


@runtime_checkable
class Updater(Protocol):
    """Takes optimizer steps on the policy it was made with.

    Attributes:
        forward: The policy's forward, as this updater has it run.
        is_sharded: Whether a rank holds a part of the weights or moments only. Then ``state_dict``, ``weights`` and
            ``forward`` are collectives.
    """

    forward: Forward
    is_sharded: bool

    def step(self, batches: Sequence[Batch], learning_rate: float) -> UpdateStats:
        """One optimizer step over micro-batches that share their denominators.

        Raises:
            NonFiniteError: the loss or the gradient is not finite; no weight has changed. On every rank.
        """
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter by name, whole and as exact as this updater holds it."""
        ...

    def state_dict(self) -> Mapping[str, Any]:
        """What a checkpoint must hold beside the weights: tensors by name, and plain JSON values."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what ``state_dict`` gave."""
        ...
