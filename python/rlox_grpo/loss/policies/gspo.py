"""GSPO: one ratio for each sequence."""

from __future__ import annotations

from rlox_grpo.loss.inputs import LossInputs, PolicyTerm
from rlox_grpo.loss.ratios import average_rows, clipped


def gspo(inputs: LossInputs) -> PolicyTerm:
    """The clipped objective with the sequence's ratio s_i = exp(Σ log_ratio / L_i).

    Each token gets 1/L_i of the gradient of s_i. With ``loss_aggregation="sequence_sum"`` this loss is LUSPO
    (arXiv:2602.05261).

    Sources: GSPO, arXiv:2507.18071, eq. 5 and 7; TRL, ``importance_sampling_level="sequence"``.
    """
    o = inputs.options
    log_ratio = average_rows(inputs.log_ratio, inputs.mask).expand_as(inputs.mask)  # [N, T], equal within a row
    return clipped(log_ratio, inputs.advantages, o.clip_low, o.clip_high, delta=o.delta)
