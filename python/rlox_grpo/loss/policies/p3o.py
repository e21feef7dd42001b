"""P3O: the effective sample size of the step as the cap of the weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from rlox_grpo.distributed.ranks import Ranks
from rlox_grpo.loss.inputs import LossInputs, PolicyTerm, StepInputs
from rlox_grpo.loss.kl import LOG_RATIO_LIMIT
from rlox_grpo.types import Batch


def policy_sample_size(
    log_probs: Sequence[Tensor | None], batches: Sequence[Batch | LossInputs], *, ranks: Ranks | None = None
) -> float:
    """Return the normalised effective sample size of a step's ratios, (Σr)² / (n·Σr²): from 1/n to 1.

    The sums are over the n loss tokens of all micro-batches and ranks, whatever their layout, with r = exp(log_probs
    − old_log_probs). A batch without old or new log-probs has r = 1. Without any token the size is 1.
    (arXiv:2605.12380, eq. 11.)
    """
    # float64 [3]: Σr, Σr², n. Example: r = 1 1 4 gives 6 18 3, so the size is 36 / (3 · 18) = 2/3.
    sums = np.zeros(3)
    for current, batch in zip(log_probs, batches, strict=True):
        mask = batch.mask if isinstance(batch, LossInputs) else batch.loss_mask
        old = batch.old_log_probs if isinstance(batch, LossInputs) else batch.log_probs.old
        if current is None or old is None:
            sums += float(mask.sum())
            continue
        log_ratio = current.detach()[mask].double() - old[mask].double()
        ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        sums += [float(ratio.sum()), float(ratio.square().sum()), ratio.numel()]
    # Sums are added over ranks, not means, because ranks have different numbers of tokens.
    gathered = (ranks or Ranks()).gather_bytes(sums.tobytes())
    total, squares, count = np.sum([np.frombuffer(data) for data in gathered], axis=0).tolist()
    return float(min(total**2 / (count * squares), 1.0)) if count else 1.0


class P3O:
    """−sg(min(r, e)) A log_probs + (1 − e)·(1/r + log_ratio − 1), where e is an effective sample size.

    The number e is the normalised effective sample size of the step's ratios. The penalty estimates KL(π ‖ π_old).

    Source: Trust the Batch, arXiv:2605.12380, eq. 11 and 12; FeynRL, algs/P3O.
    """

    def measure(self, step: StepInputs) -> float:
        """Return e of the whole optimizer step; 1 for the first step of a batch, without a forward pass."""
        if step.is_on_policy:
            return 1.0
        inputs = step.micro_batches
        return policy_sample_size([micro_batch.log_probs for micro_batch in inputs], inputs, ranks=step.ranks)

    def __call__(self, inputs: LossInputs) -> PolicyTerm:
        """Return the loss of each token."""
        size = inputs.measured
        if size is None:
            raise ValueError(
                "policy_loss='p3o' and batch.policy.measured is None: compute the effective sample size of the whole "
                "optimizer step first, by rlox_grpo.loss.step_statistics.with_step_statistics"
            )
        ratio = inputs.ratio
        # This is k3 against the old policy: exp(d) - d - 1 with d = old_log_probs - log_probs.
        distance = (-inputs.log_ratio).exp() + inputs.log_ratio - 1
        loss = -ratio.detach().clamp(max=size) * inputs.advantages * inputs.log_probs + (1 - size) * distance
        return PolicyTerm(loss, high=ratio > size, metrics={"effective_sample_size": ratio.new_full(ratio.shape, size)})


p3o = P3O()
