"""The embedded engine: generation by a transformers model in this process."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rlox_grpo.config.schema import GRPOConfig
from rlox_grpo.distributed.ranks import Ranks
from rlox_grpo.model.policy import Policy
from rlox_grpo.model.precision import cast_weights, stores_bfloat16
from rlox_grpo.rollout.engines.hf.engine import HFEngine


def make_engine(config: GRPOConfig, policy: Policy, ranks: Ranks) -> HFEngine:
    """Create the engine for one rank. Each rank samples from its own module."""
    # The engine needs its own weights if it samples during an update, or if the policy's weights are sharded.
    stages = config.split()
    takes_weights = stages.sampling.async_steps > 0 or stages.sharding.shards_weights
    model = _copy_model(policy) if takes_weights else policy.model
    if takes_weights and stores_bfloat16(
        stages.update, stages.sharding, has_adapter=hasattr(policy.model, "peft_config")
    ):
        cast_weights(model, torch.bfloat16, trained=True)
    return HFEngine(
        model,
        policy.tokenizer,
        eos_token_ids=policy.eos_token_ids,
        vocab_limit=policy.vocabulary,
        max_rows=config.max_rollout_rows,
        autocast_dtype=torch.bfloat16 if config.dtype == "bfloat16" else None,
        takes_weights=takes_weights,
        cuda_graphs=config.cuda_graphs,
        reader=policy.reader,
        fp32_lm_head=config.fp32_lm_head is True,
    )


def _copy_model(policy: Policy) -> nn.Module:
    """Copy the model with its adapters merged, as ``load_weights`` will give it."""
    copied: Any = policy.copy_whole()
    # Updates arrive merged (collect_weights), and a model with adapter layers could not load them.
    merged: nn.Module = copied.merge_and_unload() if hasattr(copied, "peft_config") else copied
    return merged.eval()
