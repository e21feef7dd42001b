"""DRO: direct reward optimisation."""

from __future__ import annotations

from rlox_grpo.loss.inputs import LossInputs, PolicyTerm


def dro(inputs: LossInputs) -> PolicyTerm:
    """−A log_probs + β/2 log_ratio², with β = ``dro_beta``.

    As in verl, the penalty of a token is against the old policy.

    Sources: DRO, arXiv:2405.19107; verl's ``dro``.
    """
    beta = inputs.options.dro_beta
    if beta is None:
        raise ValueError("policy_loss='dro' and dro_beta is None: set dro_beta, such as 0.1")
    return PolicyTerm(-inputs.advantages * inputs.log_probs + 0.5 * beta * inputs.log_ratio.square())
