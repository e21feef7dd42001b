"""The GRPO objective as pure functions of log-probs: one loss serves every preset.

Every sum runs in float64 under ``loss_mask`` and is divided by a denominator of the whole optimizer step, so that
micro-batch losses add up to the step's loss. A masked position contributes exactly nothing, whatever it holds.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rlox_grpo.types import Batch, LossOutput

KLEstimator = Literal["k1", "k2", "k3", "abs"]
LossAggregation = Literal["sequence_mean", "token_mean", "fixed_length", "sequence_sum"]

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped here: exp(20) is 4.9e8, beyond which one token would drown a batch."""


def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, estimator: KLEstimator = "k3") -> Tensor:
    """Per-token estimate of KL(policy ‖ reference), same shape as ``log_probs``.

    With d = ref_log_probs − log_probs: k1 is −d (unbiased, can be negative), k2 is d²/2, k3 is exp(d) − d − 1
    (unbiased and never negative; DeepSeekMath eq. 4), abs is |d|. Schulman, "Approximating KL divergence", 2020.

    Raises:
        ValueError: unknown ``estimator``.
    """
    difference = (ref_log_probs - log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        return torch.expm1(difference) - difference
    if estimator == "abs":
        return difference.abs()
    raise ValueError(f"estimator is {estimator!r}: expected 'k1', 'k2', 'k3' or 'abs'")


def aggregate(
    values: Tensor,
    mask: Tensor,
    how: LossAggregation = "sequence_mean",
    *,
    num_loss_tokens: float | None = None,
    num_sequences: float | None = None,
    max_length: int | None = None,
) -> Tensor:
    """One float64 scalar from per-token ``values [N, T]`` under the boolean ``mask [N, T]``.

    - ``sequence_mean``: mean over sequences of the mean over a sequence's tokens (DeepSeekMath eq. 3).
    - ``token_mean``: sum over the number of tokens (DAPO, arXiv:2503.14476, eq. 8).
    - ``fixed_length``: sum over sequences × ``max_length`` (Dr. GRPO, arXiv:2503.20783).
    - ``sequence_sum``: mean over sequences of the sum over a sequence's tokens.

    Args:
        values: any float dtype; positions outside ``mask`` may hold anything, NaN included.
        mask: True on tokens that count.
        how: one of the above.
        num_loss_tokens: tokens of the whole optimizer step; this tensor's own when None.
        num_sequences: sequences of the whole optimizer step that hold a token; this tensor's own when None.
        max_length: tokens that every sequence counts for under ``fixed_length``.

    Raises:
        ValueError: unknown ``how``; shapes that differ; a ``max_length`` that is missing under ``fixed_length``.
    """
    if values.shape != mask.shape:
        raise ValueError(f"values has shape {tuple(values.shape)} and mask {tuple(mask.shape)}: they must be equal")
    kept = torch.where(mask, values, 0).double()
    lengths = mask.sum(dim=-1)  # [N]
    if num_loss_tokens is None:
        num_loss_tokens = float(lengths.sum())
    if num_sequences is None:
        num_sequences = float((lengths > 0).sum())
    tokens, sequences = max(num_loss_tokens, 1.0), max(num_sequences, 1.0)
    if how == "sequence_mean":
        return (kept.sum(dim=-1) / lengths.clamp(min=1)).sum() / sequences
    if how == "token_mean":
        return kept.sum() / tokens
    if how == "sequence_sum":
        return kept.sum() / sequences
    if how == "fixed_length":
        if max_length is None or max_length < 1:
            raise ValueError(f"max_length is {max_length}: loss_aggregation='fixed_length' needs a positive length")
        return kept.sum() / (sequences * max_length)
    raise ValueError(f"how is {how!r}: expected 'sequence_mean', 'token_mean', 'fixed_length' or 'sequence_sum'")


def grpo_loss(
    log_probs: Tensor,
    batch: Batch,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float = 0.0,
    kl_estimator: KLEstimator = "k3",
    loss_aggregation: LossAggregation = "sequence_mean",
    max_length: int | None = None,
) -> LossOutput:
    """The clipped GRPO objective, negated, of one micro-batch (DeepSeekMath, arXiv:2402.03300, eq. 3).

    Per token: −min(r A, clip(r, 1 − clip_low, 1 + clip_high) A) + kl_coef · KL, with r = exp(log_probs −
    old_log_probs). When the batch carries no ``old_log_probs`` it was sampled from these very weights: r is 1 and
    its gradient is that of ``log_probs``. ``importance_weights`` that it carries multiply the term before the penalty.

    Args:
        log_probs: ``[N, T]`` with gradient, of the completion tokens at the sampling temperature.
        batch: the micro-batch; its denominators are those of the whole optimizer step.
        clip_low, clip_high: ε below and above.
        kl_coef: weight β of the penalty; 0 leaves it out.
        kl_estimator: see :func:`kl_penalty`.
        loss_aggregation: see :func:`aggregate`.
        max_length: see :func:`aggregate`.

    Raises:
        ValueError: shapes that differ, or ``kl_coef`` > 0 without ``ref_log_probs``.
    """
    if log_probs.shape != batch.loss_mask.shape:
        raise ValueError(
            f"log_probs has shape {tuple(log_probs.shape)} and batch.loss_mask {tuple(batch.loss_mask.shape)}"
        )
    if kl_coef > 0 and batch.ref_log_probs is None:
        raise ValueError(f"kl_coef is {kl_coef:g} and batch.ref_log_probs is None: a KL penalty needs a reference")
    mask = batch.loss_mask
    # float32 at least, and nothing but zeros outside the mask: 0 · inf would poison the gradient.
    log_probs = torch.where(mask, log_probs, 0)
    log_probs = log_probs.float() if log_probs.dtype in (torch.float16, torch.bfloat16) else log_probs
    old_log_probs = log_probs.detach() if batch.old_log_probs is None else batch.old_log_probs
    log_ratio = torch.where(mask, log_probs - old_log_probs, 0).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    advantages = batch.advantages.to(log_probs.dtype).unsqueeze(-1)  # [N, 1]
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    token_loss = -torch.minimum(unclipped, clipped)
    if batch.importance_weights is not None:
        token_loss = token_loss * batch.importance_weights
    kl = None
    if batch.ref_log_probs is not None:
        kl = kl_penalty(log_probs, torch.where(mask, batch.ref_log_probs, 0), kl_estimator)
        if kl_coef > 0:
            token_loss = token_loss + kl_coef * kl
    loss = aggregate(
        token_loss,
        mask,
        loss_aggregation,
        num_loss_tokens=batch.num_loss_tokens,
        num_sequences=batch.num_sequences,
        max_length=max_length,
    )

    def token_mean(values: Tensor) -> Tensor:
        return aggregate(values.detach(), mask, "token_mean", num_loss_tokens=batch.num_loss_tokens)

    negative, positive = advantages < 0, advantages > 0
    metrics = {
        "policy/loss": loss.detach(),
        "policy/ratio_mean": token_mean(ratio),
        "policy/clip_fraction_low": token_mean(((ratio < 1 - clip_low) & negative).float()),
        "policy/clip_fraction_high": token_mean(((ratio > 1 + clip_high) & positive).float()),
    }
    if kl is not None:
        metrics["policy/kl"] = token_mean(kl)
    return LossOutput(loss=loss, metrics=metrics)
