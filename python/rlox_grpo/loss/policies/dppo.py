"""DPPO: a token is left out once its probability has moved too far."""

from __future__ import annotations

import torch

from rlox_grpo.loss.inputs import LossInputs, PolicyTerm


def dppo(inputs: LossInputs) -> PolicyTerm:
    """−sg(min(r, delta)) A log_probs for tokens whose probability has moved by less than the bounds.

    Tokens with A > 0 are masked once π − π_old > clip_high, the others once π − π_old < −clip_low.

    Sources: DPPO with the binary total variation, arXiv:2602.04879; verl's ``dppo_tv``.
    """
    ratio, advantages, delta = inputs.ratio, inputs.advantages, inputs.options.delta
    # [N, T], π - π_old of each token; log_probs - log_ratio is old_log_probs, up to the clamp of log_ratio.
    moved = inputs.log_probs.detach().exp() - (inputs.log_probs - inputs.log_ratio).detach().exp()
    # Example: π_old 0.01 and π 0.05, so r = 5, moved by 0.04: kept, where PPO's bound on the ratio would clip it.
    high = (moved > inputs.options.clip_high) & (advantages > 0)
    low = (moved < -inputs.options.clip_low) & (advantages <= 0)
    weight = ratio.detach() if delta is None else ratio.detach().clamp(max=delta)
    return PolicyTerm(torch.where(low | high, 0, -weight * advantages * inputs.log_probs), low=low, high=high)
