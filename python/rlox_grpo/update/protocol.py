"""The interface of an updater: what applies gradients to the policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from torch import Tensor

from rlox_grpo.distributed.ranks import Ranks
from rlox_grpo.model.forward import Forward


class Updater(Protocol):
    """Adds up gradients of one policy and takes optimizer steps.

    An optimizer step is one call of ``backward`` for each of this rank's micro-batches, then ``step`` or ``discard``.

    Attributes:
        forward: The policy's forward pass under this updater.
        is_sharded: Whether a rank holds only a part of the weights or moments. Then ``state_dict``, ``weights`` and
            ``forward`` are collectives.
        is_model_sharded: Whether a rank's model has only a part of the weights. Otherwise it has all weights of a
            forward pass, even if the optimizer's state is sharded.
        masters: Float32 weights that the steps change, by the parameter's name, if the model holds rounded copies.
        weights_are_whole: False while an optimizer step has changed some of the weights but not all.
        peak_learning_rate: The option ``learning_rate``, or the learning rate of a custom optimizer.
    """

    forward: Forward
    is_sharded: bool
    is_model_sharded: bool
    masters: Mapping[str, Tensor]
    weights_are_whole: bool
    peak_learning_rate: float

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Add the gradient of one micro-batch's loss.

        If the model is sharded, ``backward`` is a collective, even if the loss is NaN.

        Args:
            loss: scalar; its denominators are those of the whole optimizer step over micro-batches and ranks.
            is_last: whether this is the rank's last micro-batch before ``step``.
        """
        ...

    def step(self, learning_rate: float) -> float:
        """Sum the gradients over ranks, clip them, and take one optimizer step. Return their norm before the clipping.

        Raises:
            NonFiniteError: the norm is not finite; no weight has changed. Raised on every rank.
        """
        ...

    def discard(self, *, on_every_rank: bool) -> None:
        """Drop the gradients, so that none of them adds to the next step.

        Args:
            on_every_rank: every rank discards its gradients now, because the loss of one rank is not finite. False:
                only this rank has an error, so no collective may run.
        """
        ...

    def start(self) -> None:
        """Cast and shard the model to the form that it has in every step.

        ``start`` is called before the first completions are sampled. Otherwise the first completions after a resume
        would be sampled from weights in another rounding.
        """
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Return every parameter by name, gathered from its shards, in the updater's highest precision."""
        ...

    def set_weight(self, name: str, tensor: Tensor, value: Tensor) -> None:
        """Copy ``value``, a whole weight, into ``tensor``, a parameter or buffer of the model, and into its master.

        Every rank calls this with the same weights, in the same order.
        """
        ...

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state that a checkpoint needs besides the weights: tensors by name, and plain JSON values."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of ``state_dict``."""
        ...


def gather_weights(updater: Updater, ranks: Ranks) -> dict[str, Tensor]:
    """Gather every parameter on rank 0, in host memory if they are sharded.

    All ranks call this method; all ranks except rank 0 get {}.
    """
    # Every rank iterates over all parameters, because each is gathered by a collective. Only rank 0 stores them.
    return {
        name: tensor.cpu() if updater.is_sharded else tensor for name, tensor in updater.weights() if ranks.is_first
    }
