"""Make the updater that a configuration names."""

from __future__ import annotations

from typing import Any

from torch import nn

from rlox_grpo.config.schema import GRPOConfig
from rlox_grpo.distributed.ranks import Ranks
from rlox_grpo.model.forward import Forward
from rlox_grpo.update.protocol import LossFn, Updater


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
