"""What applies the gradient: one protocol, several updaters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import nn

from rlox_grpo.config import GRPOConfig
from rlox_grpo.forward import Forward
from rlox_grpo.types import Batch, LossOutput, UpdateStats

LossFn = Callable[..., LossOutput]
"""``loss_fn(log_probs, batch, entropy=entropy)``: a micro-batch and what the forward gave for it → loss."""


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


def make_updater(config: GRPOConfig, model: nn.Module, forward: Forward, loss_fn: LossFn) -> Updater:
    """The updater that ``config`` names, over ``model``'s trainable parameters."""
    from rlox_grpo.update.torch_updater import TorchUpdater

    return TorchUpdater(
        model,
        forward,
        loss_fn,
        weight_decay=config.weight_decay,
        betas=(config.adam_beta1, config.adam_beta2),
        epsilon=config.adam_epsilon,
        max_grad_norm=config.max_grad_norm,
    )
