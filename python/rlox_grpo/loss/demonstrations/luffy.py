"""LUFFY: the probability of a demonstration's token, shaped so that rare tokens have a gradient."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlox_grpo.loss.demonstrations import DemonstrationInputs


def luffy(inputs: DemonstrationInputs) -> Tensor:
    """−A·f(π), f(π) = π/(π + γ): the shaped ratio to a demonstrator of probability 1, without a clip.

    The gradient is −A·γπ/(π + γ)²·∇log π, largest at π = γ.

    Source: LUFFY, arXiv:2504.14945, policy shaping, with γ = 0.1; the authors' code takes the probability of the
    demonstrator as 1.
    """
    # π/(π + γ) = 1/(1 + γ/π) = sigmoid(log π − log γ), which neither overflows nor divides by 0.
    return -inputs.advantages * torch.sigmoid(inputs.log_probs - math.log(inputs.options.demo_gamma))
