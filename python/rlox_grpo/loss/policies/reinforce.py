"""REINFORCE: the plain policy gradient."""

from __future__ import annotations

from rlox_grpo.loss.inputs import LossInputs, PolicyTerm


def reinforce(inputs: LossInputs) -> PolicyTerm:
    """−A · log_probs. The loss does not use the importance ratio.

    Source: Williams, Simple statistical gradient-following algorithms, 1992.
    """
    return PolicyTerm(-inputs.advantages * inputs.log_probs)
