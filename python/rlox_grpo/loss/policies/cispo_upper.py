"""CISPO with an upper bound only."""

from __future__ import annotations

from rlox_grpo.loss.inputs import LossInputs, PolicyTerm
from rlox_grpo.loss.ratios import weighted


def cispo_upper(inputs: LossInputs) -> PolicyTerm:
    """−sg(min(r, 1 + clip_high)) A log_probs.

    Source: open-instruct.
    """
    return weighted(inputs.log_probs, inputs.log_ratio, inputs.advantages, 0.0, 1 + inputs.options.clip_high)
