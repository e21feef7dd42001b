"""kl-cov: tokens of high covariance are held near the old policy."""

from __future__ import annotations

import torch
from torch import Tensor

from rlox_grpo.loss.covariance import refuse_missing, select_largest
from rlox_grpo.loss.inputs import LossInputs, PolicyTerm, StepInputs


class KLCov:
    """−r A, plus covariance_kl_coef · |log_ratio| for the selected tokens; see :mod:`rlox_grpo.loss.covariance`.

    Nothing is clipped. In the first optimizer step of a batch the log-ratio is 0 and the penalty has no gradient.

    Sources: arXiv:2505.22617; verl's ``kl_cov``.
    """

    def measure(self, step: StepInputs) -> list[Tensor]:
        """Select the tokens: ``bool [N, T]`` for each micro-batch."""
        return select_largest(step)

    def __call__(self, inputs: LossInputs) -> PolicyTerm:
        """Return the loss of each token."""
        # bool [N, T], the tokens of this micro-batch with the largest covariances of the step.
        selected = refuse_missing("kl_cov", inputs.measured)
        penalty = torch.where(selected, inputs.options.covariance_kl_coef * inputs.log_ratio.abs(), 0)
        return PolicyTerm(
            -inputs.ratio * inputs.advantages + penalty, metrics={"covariance_fraction": selected.float()}
        )


kl_cov = KLCov()
