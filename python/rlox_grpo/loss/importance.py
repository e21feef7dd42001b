"""Train/inference mismatch: the gap between the sampler's and the trainer's log-probs, and weights that correct for it.

An engine with other kernels or another precision samples from a slightly different policy than the trainer's, so the
gradient is off-policy even when the weights are equal. With d = old_log_probs − sampling_log_probs for each token and ρ
= exp(d), weighting the policy term by ρ corrects its expectation; a cap bounds the variance of ρ. Sources: Yao et al.,
"Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025) for truncation; TRL's
`vllm_importance_sampling_mode` and verl's `rollout_is` for the variants; IcePop for masking between two bounds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from rlox_grpo.config.records.loss import ImportanceConfig
from rlox_grpo.distributed.ranks import Ranks
from rlox_grpo.loss.kl import LOG_RATIO_LIMIT
from rlox_grpo.types import Batch

ImportanceLevel = Literal["token", "sequence", "sequence_mean"]

_DEFAULTS = ImportanceConfig()


def importance_weights(
    old_log_probs: Tensor,
    sampling_log_probs: Tensor,
    mask: Tensor,
    level: ImportanceLevel,
    config: ImportanceConfig = _DEFAULTS,
) -> Tensor:
    """Return the weight of each token's policy term: ``float32 [N, T]``, 0 outside ``mask``, without a gradient.

    With d_t = old_log_probs − sampling_log_probs of token t, the levels are:

    - ``token``: ρ_t = exp(d_t) (TRL ``token_*``, verl ``rollout_is: token``).
    - ``sequence``: exp(Σ d_t) on each token of a sequence (TRL ``sequence_*``, verl ``rollout_is: sequence``). This
      weight is unbiased, and exceeds the bounds sooner in longer sequences.
    - ``sequence_mean``: exp(mean d_t), the geometric mean of the token ratios, which does not depend on the length
      (verl's geometric rejection; the ratio of GSPO, arXiv:2507.18071, between sampler and trainer).

    ``importance_mode="truncate"`` clips a ratio to [``importance_floor``, ``importance_cap``]; ``"mask"`` sets a
    ratio outside these bounds to 0. As in TRL, neither mode changes a denominator of the loss. Sums run in float64
    and a log-ratio is clamped at ±20 before ``exp``.

    Args:
        old_log_probs: ``[N, T]``, computed by the trainer with the weights that sampled the completions.
        sampling_log_probs: ``[N, T]``, as the engine reported them.
        mask: ``bool [N, T]``, tokens that count; values at other positions are ignored.
        level: ``token``, ``sequence`` or ``sequence_mean``, as above.
        config: mode and bounds.

    Raises:
        ValueError: unknown ``level``, or a floor that is not below the cap.
    """
    floor, cap = config.importance_floor, config.importance_cap
    if floor >= cap:
        raise ValueError(f"importance_floor is {floor:g} and importance_cap {cap:g}: expected floor < cap")
    # float64 [N, T]: d, and 0 outside the mask. For a sequence its shape becomes [N, 1], and the last line spreads
    # the value over the tokens. Example: d of two tokens 0.1 0.3. The ratios are exp of 0.1 0.3 by token, of 0.4 for
    # both tokens by sequence, and of 0.2 for both by sequence_mean.
    difference = _difference(old_log_probs, sampling_log_probs, mask)
    if level == "sequence":
        difference = difference.sum(dim=-1, keepdim=True)
    elif level == "sequence_mean":
        difference = difference.sum(dim=-1, keepdim=True) / mask.sum(dim=-1, keepdim=True).clamp(min=1)
    elif level != "token":
        raise ValueError(f"level is {level!r}: expected 'token', 'sequence' or 'sequence_mean'")
    ratio = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    if config.importance_mode == "truncate":
        # Example: floor 0.5, cap 2 and ratios 0.4 1 3. Truncation gives 0.5 1 2, masking 0 1 0.
        ratio = ratio.clamp(floor, cap)
    else:
        ratio = torch.where((ratio >= floor) & (ratio <= cap), ratio, 0)
    return torch.where(mask, ratio, 0).float()


def effective_sample_size(total: float, squares: float, count: float) -> float:
    """Return Kish's (Σw)² / (n Σw²) from Σw, Σw² and n: 1 when all weights are equal, 1/n when one has all of it."""
    return total**2 / (count * squares) if squares > 0 else 0.0


def correction_level(config: ImportanceConfig, *, exact: bool) -> ImportanceLevel | None:
    """Return the level of the correction for an engine; None without a correction.

    Args:
        config: the options.
        exact: whether the engine's log-probs are the trainer's own.
    """
    chosen = config.importance_correction
    if chosen == "none" or config.bypass_old_log_probs or (chosen == "auto" and exact):
        return None
    return "token" if chosen == "auto" else chosen


def with_importance_weights(batch: Batch, level: ImportanceLevel | None, config: ImportanceConfig) -> Batch:
    """Return the micro-batch with the weights of its tokens; unchanged without a ``level``."""
    if level is None:
        return batch
    weights = importance_weights(*_both(batch), batch.loss_mask, level, config)
    return replace(batch, policy=replace(batch.policy, importance=weights))


def mismatch_metrics(batches: Sequence[Batch], ranks: Ranks | None = None) -> dict[str, float]:
    """Measure the gap between ``old_log_probs`` and ``sampling_log_probs`` over loss tokens; {} if one is missing.

    Here d is old_log_probs − sampling_log_probs of a token, and ρ = exp(d). ``mismatch/gap_mean`` and ``_max`` are the
    mean and the maximum of |d|. ``kl_k1`` (−d) and ``kl_k3`` (ρ − d − 1) estimate KL(sampler ‖ trainer).
    ``effective_sample_size`` is that of the unclipped token ratios ρ. If there are importance weights, their mean,
    minimum and maximum and the share of loss tokens with weight 0 are added.

    Args:
        batches: this rank's micro-batches.
        ranks: the ranks that have the step's other micro-batches; every rank calls this. Means are over the tokens of
            all ranks.
    """
    measured = [  # with bypass_old_log_probs the old log-probs are the sampler's
        batch
        for batch in batches
        if batch.log_probs.old is not None and batch.log_probs.old is not batch.log_probs.sampling
    ]
    # float64 [n] of each micro-batch's loss tokens, on the host.
    differences = [_difference(*_both(batch), batch.loss_mask)[batch.loss_mask].cpu() for batch in measured]
    d = torch.cat(differences) if differences else torch.zeros(0, dtype=torch.float64)
    ratio = d.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    weighted = [(batch.policy.importance, batch.loss_mask) for batch in measured if batch.policy.importance is not None]
    w = torch.cat([d[:0], *(weights[mask].double().cpu() for weights, mask in weighted)])
    # Sums and not means, because ranks have different numbers of tokens.
    sums: list[float | Tensor] = [
        len(d),
        d.abs().sum(),
        -d.sum(),
        (ratio - d - 1).sum(),
        ratio.sum(),
        ratio.square().sum(),
    ]
    sums += [len(w), w.sum(), (w == 0).sum()]
    # Of the weight also the smallest, with its sign changed. A rank without tokens has no part in a maximum.
    extremes = [float(values.max()) if len(values) else -math.inf for values in (d.abs(), w, -w)]
    gathered = (ranks or Ranks()).gather([[float(value) for value in sums], extremes])
    totals = [float(sum(values)) for values in zip(*(rank_sums for rank_sums, _ in gathered), strict=True)]
    tokens, gap, k1, k3, mass, squares, num_weights, weight, masked = totals
    gap_max, weight_max, weight_min = (
        max(values) for values in zip(*(rank_extremes for _, rank_extremes in gathered), strict=True)
    )
    if not tokens:
        return {}
    metrics = {
        "mismatch/gap_mean": gap / tokens,
        "mismatch/gap_max": gap_max,
        "mismatch/kl_k1": k1 / tokens,
        "mismatch/kl_k3": k3 / tokens,
        "mismatch/effective_sample_size": effective_sample_size(mass, squares, tokens),
    }
    if num_weights:
        metrics["mismatch/weight_mean"] = weight / num_weights
        metrics["mismatch/weight_min"] = -weight_min
        metrics["mismatch/weight_max"] = weight_max
        metrics["mismatch/masked_fraction"] = masked / num_weights
    return metrics


def measure_truncated_mass(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return ``mismatch/truncated_mass``, for log-probs of a truncated sampler and of a trainer that truncates nothing.

    A token's ρ is then the probability that the filters left, π(S), whose mean is 1 + kl_k3 − kl_k1. The value is the
    probability that they cut off, with the noise of any other mismatch; {} if ``metrics`` has no mismatch.
    """
    if "mismatch/kl_k1" not in metrics:
        return {}
    return {"mismatch/truncated_mass": metrics["mismatch/kl_k1"] - metrics["mismatch/kl_k3"]}


def gap_shares(log_probs: Tensor, batch: Batch) -> Mapping[str, Tensor]:
    """Compute the means of :func:`mismatch_metrics` from the update's forward pass, for steps without old log-probs.

    Each metric is a sum over the micro-batch's loss tokens divided by the step's number of loss tokens, so that the
    values of the micro-batches add up, as in :class:`rlox_grpo.types.LossOutput`.
    """
    if batch.log_probs.sampling is None:
        return {}
    d = _difference(log_probs.detach(), batch.log_probs.sampling, batch.loss_mask)
    tokens = max(batch.totals.num_loss_tokens, 1.0)
    ratio = d.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return {
        "mismatch/gap_mean": d.abs().sum() / tokens,
        "mismatch/kl_k1": -d.sum() / tokens,
        "mismatch/kl_k3": (ratio - d - 1).sum() / tokens,  # exactly 0 outside the mask
    }


def _difference(old_log_probs: Tensor, sampling_log_probs: Tensor, mask: Tensor) -> Tensor:
    # In float64, because d is the small difference of two float32 numbers, and is summed over a sequence.
    return torch.where(mask, old_log_probs.detach().double() - sampling_log_probs.double(), 0)


def _both(batch: Batch) -> tuple[Tensor, Tensor]:
    if batch.log_probs.old is None or batch.log_probs.sampling is None:
        raise ValueError("importance weights need old_log_probs and sampling_log_probs, and a batch lacks one of them")
    return batch.log_probs.old, batch.log_probs.sampling
