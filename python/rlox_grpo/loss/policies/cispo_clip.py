"""CISPO with a lower and an upper bound."""

from __future__ import annotations

from rlox_grpo.loss.inputs import LossInputs, PolicyTerm
from rlox_grpo.loss.ratios import weighted


def cispo_clip(inputs: LossInputs) -> PolicyTerm:
    """−sg(clip(r, 1 − clip_low, 1 + clip_high)) A log_probs.

    Sources: MiniMax-M1, arXiv:2506.13585; verl.
    """
    low, high = 1 - inputs.options.clip_low, 1 + inputs.options.clip_high
    return weighted(inputs.log_probs, inputs.log_ratio, inputs.advantages, low, high)
