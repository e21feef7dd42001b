"""Which parameters are decayed, as an optimizer takes it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

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
