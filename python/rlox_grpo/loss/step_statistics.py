"""What a policy loss reads from all tokens of an optimizer step: selections and the effective sample size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from rlox_grpo.config.records.loss import LossConfig
from rlox_grpo.distributed.ranks import Ranks
from rlox_grpo.loss.covariance import SELECTING, covariance_masks
from rlox_grpo.loss.kl import LOG_RATIO_LIMIT
from rlox_grpo.types import Batch

READS_THE_STEP = (*SELECTING, "p3o")
"""The policy losses that need :func:`with_step_statistics`."""


def with_step_statistics(
    batches: Sequence[Batch],
    config: LossConfig,
    measure: Callable[[Batch], Tensor],
    *,
    seed: Sequence[int] = (0,),
    ranks: Ranks | None = None,
) -> list[Batch]:
    """Add ``covariance_mask`` or ``effective_sample_size`` to the micro-batches of an optimizer step.

    Args:
        batches: this rank's micro-batches.
        config: the policy loss, one of :data:`READS_THE_STEP`, and its options.
        measure: returns the log-probs ``[N, T]`` of the policy before the step. For ``p3o`` it is not called for
            batches without ``old_log_probs``, whose ratios are 1.
        seed: seed of the draw of ``clip_cov``, the same on every rank.
        ranks: the ranks that have the step's other micro-batches; every rank calls this.
    """
    if config.policy_loss in SELECTING:
        masks = covariance_masks([measure(batch) for batch in batches], batches, config, seed=seed, ranks=ranks)
        return [replace(batch, covariance_mask=mask) for batch, mask in zip(batches, masks, strict=True)]
    size = policy_sample_size(
        [None if batch.old_log_probs is None else measure(batch) for batch in batches], batches, ranks=ranks
    )
    return [replace(batch, effective_sample_size=size) for batch in batches]


def policy_sample_size(
    log_probs: Sequence[Tensor | None], batches: Sequence[Batch], *, ranks: Ranks | None = None
) -> float:
    """Return the normalised effective sample size of a step's ratios, (Σr)² / (n·Σr²): from 1/n to 1.

    r = exp(log_probs − old_log_probs), over the n loss tokens of all micro-batches and ranks, whatever their layout; a
    batch without either has r = 1. Without any token it is 1. (arXiv:2605.12380, eq. 11.)
    """
    sums = np.zeros(3)  # Σr, Σr², n
    for own, batch in zip(log_probs, batches, strict=True):
        mask = batch.loss_mask
        if own is None or batch.old_log_probs is None:
            sums += float(mask.sum())
            continue
        log_ratio = own.detach()[mask].double() - batch.old_log_probs[mask].double()
        ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        sums += [float(ratio.sum()), float(ratio.square().sum()), ratio.numel()]
    parts = (ranks or Ranks()).gather_bytes(sums.tobytes())
    total, squares, count = np.sum([np.frombuffer(part) for part in parts], axis=0).tolist()
    return float(min(total**2 / (count * squares), 1.0)) if count else 1.0
