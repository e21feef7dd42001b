"""CISPO with the upper bound ``clip_high`` instead of 1 + ``clip_high``."""

from __future__ import annotations

from rlox_grpo.loss.inputs import LossInputs, PolicyTerm
from rlox_grpo.loss.ratios import weighted


def cispo_cap(inputs: LossInputs) -> PolicyTerm:
    """−sg(min(r, clip_high)) A log_probs; ``clip_high`` is then about 5.

    Source: TRL.
    """
    return weighted(inputs.log_probs, inputs.log_ratio, inputs.advantages, 0.0, inputs.options.clip_high)
