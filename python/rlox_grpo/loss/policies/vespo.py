"""VESPO: a smooth weight of the sequence's ratio."""

from __future__ import annotations

from math import log

import torch

from rlox_grpo.loss.inputs import LossInputs, PolicyTerm
from rlox_grpo.loss.ratios import select_by_sign


def vespo(inputs: LossInputs) -> PolicyTerm:
    """−sg(φ(w)) A log_probs with φ(w) = exp(λ) wᵏ exp(−λ w) and w = exp(Σ log_ratio).

    k and λ of ``vespo_shape`` depend on the sign of A; w is clamped to 1e-8 … exp(20), as in the paper's code.

    Sources: VESPO, arXiv:2602.10693; TRL.
    """
    log_ratio, advantages = inputs.log_ratio, inputs.advantages
    k_positive, lambda_positive, k_negative, lambda_negative = inputs.options.vespo_shape
    summed = torch.where(inputs.mask, log_ratio, 0).sum(dim=-1, keepdim=True)
    log_weight = summed.detach().clamp(log(1e-8), 20.0)  # [N, 1]
    k = select_by_sign(advantages >= 0, k_positive, k_negative, log_ratio)
    rate = select_by_sign(advantages >= 0, lambda_positive, lambda_negative, log_ratio)
    # [N, T]: exp(λ + k log w - λ w), which is 1 at w = 1.
    phi = (rate + k * log_weight - rate * log_weight.exp()).exp()
    return PolicyTerm(-phi * advantages * inputs.log_probs)
