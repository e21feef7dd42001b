"""Train/inference mismatch: how far the sampler's log-probs are from the trainer's, and weights that correct for it.

An engine with other kernels or another precision samples from a slightly other policy than the one that is trained,
so the gradient is off-policy even when the weights are equal. With d = old_log_probs − sampling_log_probs for each
token and ρ = exp(d), weighting the policy term by ρ makes its expectation the trainer's own again; a cap keeps the
variance of ρ from drowning the batch. Sources: Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy
RL Training" (2025) for truncation; TRL's `vllm_importance_sampling_mode` and verl's `rollout_is` for the variants;
IcePop for masking between two bounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from rlox_grpo.loss.objective import LOG_RATIO_LIMIT
from rlox_grpo.types import Batch

ImportanceLevel = Literal["token", "sequence", "sequence_mean"]
ImportanceMode = Literal["truncate", "mask"]


def importance_weights(
    old_log_probs: Tensor,
    sampling_log_probs: Tensor,
    mask: Tensor,
    *,
    level: ImportanceLevel = "token",
    mode: ImportanceMode = "truncate",
    cap: float = 2.0,
    floor: float = 0.0,
) -> Tensor:
    """Weight of each token's policy term: ``float32 [N, T]``, 0 outside ``mask``, without a gradient.

    - ``token``: ρ_t = exp(d_t) (TRL ``token_*``, verl ``rollout_is: token``).
    - ``sequence``: exp(Σ d_t) on each token of a sequence (TRL ``sequence_*``, verl ``rollout_is: sequence``). It is
      the unbiased one, and leaves the bounds sooner the longer a sequence is.
    - ``sequence_mean``: exp(mean d_t), the geometric mean of the token ratios, which does not depend on the length
      (verl's geometric rejection; the ratio of GSPO, arXiv:2507.18071, between sampler and trainer).

    ``truncate`` moves a ratio outside of [floor, cap] to the nearer bound; ``mask`` gives it weight 0. Neither changes
    a denominator of the loss, as in TRL. Sums run in float64 and a log-ratio is clamped at ±20 before ``exp``.

    Args:
        old_log_probs: ``[N, T]``, by the trainer with the weights that sampled.
        sampling_log_probs: ``[N, T]``, as the engine reported them.
        mask: ``bool [N, T]``, tokens that count; anything may stand elsewhere.
        level, mode: as above.
        cap, floor: bounds of the ratio.

    Raises:
        ValueError: unknown ``level`` or ``mode``, or bounds that leave nothing between them.
    """
    if not 0 <= floor < cap:
        raise ValueError(f"floor is {floor:g} and cap {cap:g}: expected 0 <= floor < cap")
    difference = _difference(old_log_probs, sampling_log_probs, mask)
    if level == "sequence":
        difference = difference.sum(dim=-1, keepdim=True)
    elif level == "sequence_mean":
        difference = difference.sum(dim=-1, keepdim=True) / mask.sum(dim=-1, keepdim=True).clamp(min=1)
    elif level != "token":
        raise ValueError(f"level is {level!r}: expected 'token', 'sequence' or 'sequence_mean'")
    ratio = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    if mode == "truncate":
        ratio = ratio.clamp(floor, cap)
    elif mode == "mask":
        ratio = torch.where((ratio >= floor) & (ratio <= cap), ratio, 0)
    else:
        raise ValueError(f"mode is {mode!r}: expected 'truncate' or 'mask'")
    return torch.where(mask, ratio, 0).float()


def effective_sample_size(weights: Tensor) -> float:
    """Kish's (Σw)² / (n Σw²) of the values of ``weights``: 1 when all are equal, 1/n when one has all the weight."""
    values = weights.double().flatten()
    squares = float(values.square().sum())
    return float(values.sum()) ** 2 / (values.numel() * squares) if squares > 0 else 0.0


def correction_level(
    chosen: Literal["auto", "none", "token", "sequence", "sequence_mean"], *, exact: bool, bypass: bool
) -> ImportanceLevel | None:
    """What ``importance_correction`` means for an engine; None where there is nothing to correct."""
    if chosen == "none" or bypass or (chosen == "auto" and exact):
        return None
    return "token" if chosen == "auto" else chosen


def with_importance_weights(
    batches: Sequence[Batch], *, level: ImportanceLevel | None, mode: ImportanceMode, cap: float, floor: float
) -> list[Batch]:
    """The batches, each with its tokens' weights where a ``level`` is given; see :func:`importance_weights`."""
    if level is None:
        return list(batches)
    return [
        replace(
            batch,
            importance_weights=importance_weights(
                *_both(batch), batch.loss_mask, level=level, mode=mode, cap=cap, floor=floor
            ),
        )
        for batch in batches
    ]


def mismatch_metrics(batches: Sequence[Batch]) -> dict[str, float]:
    """The step's gap between ``old_log_probs`` and ``sampling_log_probs``, over loss tokens; {} where one is unknown.

    ``mismatch/gap_mean`` and ``_max`` are of |d|; ``kl_k1`` (−d) and ``kl_k3`` (ρ − d − 1) estimate
    KL(sampler ‖ trainer), as the tokens are the sampler's; ``effective_sample_size`` is of the token ratios ρ before
    any bound. With importance weights also their mean and largest, and the share of loss tokens
    that have none.
    """
    known = [batch for batch in batches if _both_are_known(batch)]
    differences = [_difference(*_both(batch), batch.loss_mask)[batch.loss_mask].cpu() for batch in known]
    d = torch.cat(differences) if differences else torch.zeros(0, dtype=torch.float64)
    if not d.numel():
        return {}
    ratio = d.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    metrics = {
        "mismatch/gap_mean": float(d.abs().mean()),
        "mismatch/gap_max": float(d.abs().max()),
        "mismatch/kl_k1": float(-d.mean()),
        "mismatch/kl_k3": float((ratio - d - 1).mean()),
        "mismatch/effective_sample_size": effective_sample_size(ratio),
    }
    weighted = [(batch.importance_weights, batch.loss_mask) for batch in known if batch.importance_weights is not None]
    if weighted:
        w = torch.cat([weights[mask].double().cpu() for weights, mask in weighted])
        metrics["mismatch/weight_mean"] = float(w.mean())
        metrics["mismatch/weight_max"] = float(w.max())
        metrics["mismatch/masked_fraction"] = float((w == 0).double().mean())
    return metrics


def gap_shares(log_probs: Tensor, batch: Batch) -> Mapping[str, Tensor]:
    """The means of :func:`mismatch_metrics` from a micro-batch's own forward, for steps whose old policy needs none.

    Sums over loss tokens by the whole step's number of them, so that micro-batches add up, as in
    :class:`rlox_grpo.types.LossOutput`.
    """
    if batch.sampling_log_probs is None:
        return {}
    d = _difference(log_probs.detach(), batch.sampling_log_probs, batch.loss_mask)
    tokens = max(batch.num_loss_tokens, 1.0)
    ratio = d.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return {
        "mismatch/gap_mean": d.abs().sum() / tokens,
        "mismatch/kl_k1": -d.sum() / tokens,
        "mismatch/kl_k3": (ratio - d - 1).sum() / tokens,  # exactly 0 outside the mask
    }


def _difference(old_log_probs: Tensor, sampling_log_probs: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, old_log_probs.detach().double() - sampling_log_probs.double(), 0)


def _both(batch: Batch) -> tuple[Tensor, Tensor]:
    if batch.old_log_probs is None or batch.sampling_log_probs is None:
        raise ValueError("importance weights need old_log_probs and sampling_log_probs, and a batch lacks one of them")
    return batch.old_log_probs, batch.sampling_log_probs


def _both_are_known(batch: Batch) -> bool:
    """Whether the old policy's log-probs are the trainer's: where they are bypassed, they are the sampler's own."""
    return batch.old_log_probs is not None and batch.old_log_probs is not batch.sampling_log_probs
