"""One ratio for each turn of an episode."""

from __future__ import annotations

from rlox_grpo.loss.inputs import LossInputs, PolicyTerm
from rlox_grpo.loss.ratios import average_turns, clipped


def gspo_turn(inputs: LossInputs) -> PolicyTerm:
    """``gspo_token`` with the mean log-ratio of the token's turn in place of that of the sequence.

    Source: GAGPO, arXiv:2605.13217, the action-level ratio.
    """
    o = inputs.options
    shared = average_turns(inputs.log_ratio, inputs.mask).detach()  # [N, T], equal within a turn
    # The difference is exactly 0. Added to a log-prob first, the mean would lose digits that the clipping range needs.
    log_ratio = shared + (inputs.log_probs - inputs.log_probs.detach())
    return clipped(log_ratio, inputs.advantages, o.clip_low, o.clip_high, delta=o.delta)
