"""The interface of an updater: what applies gradients to the policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from rlox_grpo.model.forward import Forward
from rlox_grpo.types import Batch, LossOutput, UpdateStats

LossFn = Callable[..., LossOutput]
"""``loss_fn(log_probs, batch, entropy=entropy)`` → loss; also ``distribution_kl=`` if the forward returns one."""


class Updater(Protocol):
    """Takes optimizer steps on one policy.

    Attributes:
        forward: The policy's forward pass under this updater.
        is_sharded: Whether a rank holds only a part of the weights or moments. Then ``state_dict``, ``weights`` and
            ``forward`` are collectives.
        is_model_sharded: Whether a rank's model lacks weights. Else it has all that a forward pass computes with, also
            where the optimizer's state is in shards.
        masters: Float32 weights that the steps change, by the parameter's name, if the model holds rounded copies. A
            checkpoint is loaded into both.
        weights_are_whole: False from the first weight that an optimizer step changes until it has changed all.
        peak_learning_rate: The option ``learning_rate``, or that of the user's own optimizer.
    """

    forward: Forward
    is_sharded: bool
    is_model_sharded: bool
    masters: Mapping[str, Tensor]
    weights_are_whole: bool
    peak_learning_rate: float

    def step(self, batches: Sequence[Batch], learning_rate: float) -> UpdateStats:
        """Take one optimizer step over micro-batches that share their denominators.

        After an error, no gradient of this step adds to the next one.

        Raises:
            NonFiniteError: the loss or the gradient is not finite; no weight has changed. Raised on every rank.
        """
        ...

    def start(self) -> None:
        """Cast and shard the model as every step holds it; called before the first completions are sampled.

        Otherwise the first completions after a resume would be sampled from weights in another rounding.
        """
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Return every parameter by name, gathered from its shards, in the updater's highest precision."""
        ...

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state that a checkpoint needs beside the weights: tensors by name, and plain JSON values."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of ``state_dict``."""
        ...
