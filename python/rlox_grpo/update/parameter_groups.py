"""Which parameters are decayed, as an optimizer takes it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn


def parameter_groups(
    parameters: Iterable[nn.Parameter], weight_decay: float, *, decay_vectors: bool
) -> list[dict[str, Any]]:
    """Matrices, and then norms and biases, which most trainers that decay at all leave alone; no empty group."""
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for parameter in parameters:
        (matrices if parameter.dim() >= 2 else vectors).append(parameter)
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": weight_decay if decay_vectors else 0.0},
    ]
    return [group for group in groups if group["params"]]
