"""GSPO-token: the value of the sequence's ratio, with the gradient of the token."""

from __future__ import annotations

from rlox_grpo.loss.inputs import LossInputs, PolicyTerm
from rlox_grpo.loss.ratios import average_rows, clipped


def gspo_token(inputs: LossInputs) -> PolicyTerm:
    """The clipped objective with r = sg(s_i) · exp(log_probs − sg(log_probs)), s_i as in ``gspo``.

    Value and gradient equal those of ``gspo`` over a whole sequence. The two losses differ if some tokens have no
    policy term, or if each token has its own advantage.

    Sources: GSPO, arXiv:2507.18071, GSPO-token; verl's ``gspo``.
    """
    o = inputs.options
    shared = average_rows(inputs.log_ratio, inputs.mask).detach()  # [N, 1]
    # The difference is exactly 0. Added to a log-prob first, the mean would lose digits that the clipping range needs.
    log_ratio = shared + (inputs.log_probs - inputs.log_probs.detach())
    return clipped(log_ratio, inputs.advantages, o.clip_low, o.clip_high, delta=o.delta)
