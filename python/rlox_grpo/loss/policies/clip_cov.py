"""clip-cov: tokens of high covariance have no gradient."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rlox_grpo.loss.covariance import refuse_missing, select_drawn
from rlox_grpo.loss.inputs import LossInputs, PolicyTerm, StepInputs
from rlox_grpo.loss.ratios import clipped


class ClipCov:
    """The clipped objective, and 0 for the selected tokens; see :mod:`rlox_grpo.loss.covariance`.

    Sources: arXiv:2505.22617; verl's ``clip_cov``.
    """

    def measure(self, step: StepInputs) -> list[Tensor]:
        """Draw the tokens: ``bool [N, T]`` for each micro-batch."""
        return select_drawn(step)

    def __call__(self, inputs: LossInputs) -> PolicyTerm:
        """Return the loss of each token."""
        # bool [N, T], the drawn tokens of this micro-batch.
        selected = refuse_missing("clip_cov", inputs.measured)
        term = clipped(inputs.log_ratio, inputs.advantages, inputs.options.clip_low, inputs.options.clip_high)
        metrics = {"covariance_fraction": selected.float()}
        return replace(term, loss=torch.where(selected, 0, term.loss), metrics=metrics)


clip_cov = ClipCov()
