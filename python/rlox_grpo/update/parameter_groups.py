"""AdamW, and which parameters it decays."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from rlox_grpo.config.records.update import OptimizerConfig


def parameter_groups(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> list[dict[str, Any]]:
    """Return AdamW's groups: matrices, then norms and biases, which are not decayed by default; no empty group."""
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for parameter in parameters:
        (matrices if parameter.dim() >= 2 else vectors).append(parameter)
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": config.weight_decay if config.decay_vectors else 0.0},
    ]
    return [group for group in groups if group["params"]]


def make_adamw(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """Return torch's fused AdamW over ``parameters``; each step sets its learning rate."""
    return torch.optim.AdamW(
        parameter_groups(parameters, config),
        lr=0.0,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        fused=True,
    )
