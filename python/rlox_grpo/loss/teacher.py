"""A teacher's signal: an advantage of each sampled token, or a term of the loss.

With q the teacher and π the policy, log q − log π of a sampled token estimates −KL(π ‖ q), so a policy gradient with
this advantage lowers the KL (Thinking Machines, On-Policy Distillation, 2025; GKD, arXiv:2306.13649). The rewards of
the run add their own advantage.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlox_grpo.config.records.loss import LossConfig
from rlox_grpo.loss.kl import LOG_RATIO_LIMIT
from rlox_grpo.types import Batch

SURPRISE = -5.0
"""A token surprises the teacher if log q − log π is below this: the teacher finds it 148 times less likely."""


def teacher_gap(log_probs: Tensor, batch: Batch) -> Tensor:
    """Return log q − log π of each token ``[N, T]``, without gradient, clamped to ±20; 0 outside ``loss_mask``.

    Args:
        log_probs: ``[N, T]``, the policy's.
        batch: a micro-batch with the teacher's log-probs, −inf for a token that the teacher excludes.
    """
    assert batch.log_probs.teacher is not None
    gap = (batch.log_probs.teacher - log_probs.detach()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.where(batch.loss_mask, gap, 0)


def add_teacher_advantages(advantages: Tensor, old_log_probs: Tensor, batch: Batch, options: LossConfig) -> Tensor:
    """Return the advantages ``[N, T]`` plus ``teacher_coef`` · (log q − log π_old), with ``teacher_in="advantage"``.

    Args:
        advantages: ``[N, T]`` or ``[N, 1]``, of the rewards.
        old_log_probs: ``[N, T]``, of the policy that sampled.
        batch: the micro-batch; without log-probs of a teacher the advantages are returned as they are.
        options: of them ``teacher_in`` and ``teacher_coef`` are read.
    """
    if batch.log_probs.teacher is None or options.teacher_in == "loss":
        return advantages
    # Example: a row of reward advantage 1, log q − log π_old of its tokens 0.5 -2.0, teacher_coef 1: the advantages of
    # the tokens are 1.5 -1.0. So one completion is reinforced at some tokens and made rarer at others.
    return advantages + options.teacher_coef * teacher_gap(old_log_probs, batch).to(advantages.dtype)


def teacher_loss(log_probs: Tensor, batch: Batch, options: LossConfig, distribution_kl: Tensor | None) -> Tensor | None:
    """Return ``teacher_coef`` · KL(π ‖ q) of each token ``[N, T]`` with gradient, or None if there is no such term.

    ``teacher_kl="sampled"`` is d²/2 of d = log q − log π, whose gradient −d ∇log π is that of the KL in expectation. d
    is clamped to ±20 in the value and in the gradient: a token that the teacher excludes becomes rarer.

    Args:
        log_probs: ``[N, T]`` with gradient, the policy's; 0 outside ``loss_mask``.
        batch: the micro-batch.
        options: of them ``teacher_in``, ``teacher_kl`` and ``teacher_coef`` are read.
        distribution_kl: ``[N, T]`` with gradient, the KL over the whole vocabulary; for ``teacher_kl="full"``.
    """
    if options.teacher_kl == "full" and distribution_kl is not None:
        return options.teacher_coef * torch.where(batch.loss_mask, distribution_kl, 0)
    if batch.log_probs.teacher is None or options.teacher_in == "advantage":
        return None
    gap = teacher_gap(log_probs, batch)
    # Not k2 of rlox_grpo.loss.kl, whose clamp leaves a token above it without gradient. The difference is 0, and has
    # the gradient of log π; it is masked, because 0 · inf would make the gradient NaN.
    change = torch.where(batch.loss_mask, log_probs - log_probs.detach(), 0)
    return options.teacher_coef * (gap.square() / 2 - gap * change)


def measure_teacher(log_probs: Tensor, batch: Batch, distribution_kl: Tensor | None) -> dict[str, Tensor]:
    """Return the values of each token ``[N, T]`` whose means over the step's loss tokens are ``teacher/<name>``.

    Args:
        log_probs: ``[N, T]``, the policy's.
        batch: the micro-batch.
        distribution_kl: ``[N, T]``, the KL over the whole vocabulary if it was computed.
    """
    if batch.log_probs.teacher is None:
        return {} if distribution_kl is None else {"kl": distribution_kl.detach()}
    gap = teacher_gap(log_probs, batch)
    values = {
        "kl": -gap,
        "surprised_share": (gap < SURPRISE).float(),
        "excluded_share": torch.isneginf(batch.log_probs.teacher).float(),
    }
    if batch.log_probs.is_teacher_top is not None:
        values["top1_agreement"] = batch.log_probs.is_teacher_top.float()
    return values
