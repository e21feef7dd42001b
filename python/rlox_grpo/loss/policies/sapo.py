"""SAPO: a soft gate in place of a clip."""

from __future__ import annotations

import torch

from rlox_grpo.loss.inputs import LossInputs, PolicyTerm
from rlox_grpo.loss.ratios import select_by_sign


def sapo(inputs: LossInputs) -> PolicyTerm:
    """−(4/τ) sigmoid(τ (r − 1)) A, where τ is one of ``sapo_temperatures``, chosen by the sign of A.

    Sources: SAPO, arXiv:2511.20347; TRL; verl.
    """
    ratio, advantages = inputs.ratio, inputs.advantages
    # [N, T]. The gate is steepest at r = 1, where its slope by r is 1, like that of the plain ratio.
    temperature = select_by_sign(advantages > 0, *inputs.options.sapo_temperatures, like=ratio)
    return PolicyTerm(-torch.sigmoid(temperature * (ratio - 1)) * (4 / temperature) * advantages)
