"""What applies the gradient: one protocol, several updaters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from rlox_grpo.config import GRPOConfig
from rlox_grpo.forward import Forward
from rlox_grpo.ranks import Ranks
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


def make_updater(
    config: GRPOConfig, model: nn.Module, forward: Forward, loss_fn: LossFn, ranks: Ranks | None = None
) -> Updater:
    """The updater that ``config`` names, over ``model``'s trainable parameters.

    Raises:
        ImportError: ``updater='deepspeed'`` without DeepSpeed.
    """
    options: dict[str, Any] = {
        "weight_decay": config.weight_decay,
        "decay_vectors": config.decay_vectors,
        "betas": (config.adam_beta1, config.adam_beta2),
        "epsilon": config.adam_epsilon,
        "max_grad_norm": config.max_grad_norm,
        "ranks": ranks or Ranks(),
    }
    if config.updater == "deepspeed":
        from rlox_grpo.update.deepspeed_updater import DeepSpeedUpdater

        return DeepSpeedUpdater(
            model,
            forward,
            loss_fn,
            zero_stage=config.zero_stage,
            bfloat16=config.dtype == "bfloat16",
            offload_optimizer=config.offload_optimizer,
            offload_params=config.offload_params,
            **options,
        )
    from rlox_grpo.update.torch_updater import TorchUpdater

    return TorchUpdater(model, forward, loss_fn, shards=config.shard_parameters, **options)
