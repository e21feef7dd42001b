"""Advantages: from the rewards of a step's groups to the advantage of each completion, turn or token."""

from __future__ import annotations

from rlox_grpo.advantages.functions import (
    broadcast_advantages,
    component_advantages,
    gae_advantages,
    group_advantages,
    make_advantages,
    make_turn_advantages,
    make_zero_variance_test,
    mean_scaled_advantages,
    turn_advantages,
)

__all__ = [
    "broadcast_advantages",
    "component_advantages",
    "gae_advantages",
    "group_advantages",
    "make_advantages",
    "make_turn_advantages",
    "make_zero_variance_test",
    "mean_scaled_advantages",
    "turn_advantages",
]
