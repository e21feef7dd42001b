"""Make the updater that the options name."""

from __future__ import annotations

from rlox_grpo.config.records import StageConfigs
from rlox_grpo.distributed.ranks import Ranks
from rlox_grpo.model.forward import Forward
from rlox_grpo.model.policy import Policy
from rlox_grpo.update.custom_optimizer import OptimizerFactory
from rlox_grpo.update.protocol import Updater


def make_updater(
    stages: StageConfigs,
    policy: Policy,
    forward: Forward,
    ranks: Ranks | None = None,
    optimizer: OptimizerFactory | None = None,
) -> Updater:
    """Return the updater that the options name, for the trainable parameters of ``policy``.

    Args:
        stages: the options; those of the optimizer, sharding and the update are used.
        policy: the model, with its shards, its float32 master weights, or the files of its weights.
        forward: the policy's forward pass.
        ranks: the ranks that share the step.
        optimizer: a custom optimizer, used instead of AdamW.

    Raises:
        ConfigError: an ``optimizer`` that cannot be used; see :mod:`rlox_grpo.update.custom_optimizer`.
        ImportError: ``updater='deepspeed'`` without DeepSpeed.
    """
    if stages.sharding.updater == "deepspeed":
        from rlox_grpo.update.deepspeed_updater import DeepSpeedUpdater

        return DeepSpeedUpdater(
            *(policy.model, forward, stages.optimizer, stages.sharding),
            bfloat16=stages.update.dtype == "bfloat16",
            ranks=ranks,
            stored=policy.stored,
        )
    from rlox_grpo.update.torch_updater import TorchUpdater

    return TorchUpdater(
        *(policy.model, forward, stages.optimizer),
        shards=policy.shards,
        offload=stages.sharding.offload_optimizer,
        masters=policy.masters,
        optimizer=optimizer,
        ranks=ranks,
    )
