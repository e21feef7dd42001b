"""GMPO: the geometric mean of the clipped ratios."""

from __future__ import annotations

import torch

from rlox_grpo.loss.inputs import LossInputs, PolicyTerm
from rlox_grpo.loss.ratios import average_rows


def gmpo(inputs: LossInputs) -> PolicyTerm:
    """−A exp(Σ c / L_i), where c is the log-ratio clipped pessimistically to −clip_low … clip_high.

    The bounds apply to the log-ratio; the paper uses 0.4 and 0.4. A sequence has one loss, so GMPO needs
    ``loss_aggregation="sequence_mean"``.

    Source: GMPO, arXiv:2507.20673.
    """
    log_ratio, low, high = inputs.log_ratio, inputs.options.clip_low, inputs.options.clip_high
    sign = inputs.advantages.sign()
    bounded = log_ratio.clamp(-low, high)
    # This is min(r A, clip(r) A) as a choice between log-ratios: the smaller one for A ≥ 0, the larger one for A < 0.
    # Example: bounds ±0.4 and log-ratios 0.7 0.1 -0.9. A > 0: 0.4 0.1 -0.9; A < 0: 0.7 0.1 -0.4.
    pessimistic = torch.where(sign >= 0, torch.minimum(log_ratio, bounded), torch.maximum(log_ratio, bounded))
    ratio = average_rows(pessimistic, inputs.mask).exp()  # [N, 1]
    return PolicyTerm(
        -inputs.advantages * ratio,
        low=(log_ratio < -low) & (sign < 0),
        high=(log_ratio > high) & (sign > 0),
    )
