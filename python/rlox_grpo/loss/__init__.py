"""The GRPO loss: policy losses, KL penalties, importance weights and aggregation over tokens."""

from __future__ import annotations

from rlox_grpo.loss.inputs import LossInputs, PolicyTerm, StepInputs
from rlox_grpo.loss.kl import LOG_RATIO_LIMIT, kl_penalty, token_kl
from rlox_grpo.loss.objective import aggregate, grpo_loss

__all__ = [
    "LOG_RATIO_LIMIT",
    "LossInputs",
    "PolicyTerm",
    "StepInputs",
    "aggregate",
    "grpo_loss",
    "kl_penalty",
    "token_kl",
]
