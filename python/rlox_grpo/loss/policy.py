"""Policy terms: each published per-token loss as a function of log-ratios and advantages.

In every function ``log_probs`` and ``log_ratio`` are ``[N, T]`` with gradient and 0 outside ``mask [N, T]``, and
``advantages`` is ``[N, 1]``, or ``[N, T]`` where each turn has its own. r is exp(log_ratio), sg is detach, L_i the
tokens of sequence i under the mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log

import numpy as np
import torch
from torch import Tensor

from rlox_grpo.config.records.loss import LossConfig
from rlox_grpo.distributed.ranks import Ranks


@dataclass(frozen=True, eq=False)
class PolicyTerm:
    """Losses to minimise, all ``[N, T]``.

    Attributes:
        loss: Per token; a sequence's own loss stands at each of its tokens.
        ratio: The importance ratio in the loss, of the token or of its sequence.
        low, high: Whether the ratio is clipped from below or from above. A clipped token has no gradient; in the
            ``cispo`` forms and ``p3o`` it has the gradient of the bound.
    """

    loss: Tensor
    ratio: Tensor
    low: Tensor
    high: Tensor


def policy_term(
    config: LossConfig,
    log_probs: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    selected: Tensor | None = None,
    sample_size: float | None = None,
) -> PolicyTerm:
    """Return the policy term that ``config.policy_loss`` names.

    Each function below documents the options that it reads. ``selected [N, T]`` is the batch's ``covariance_mask``,
    which ``clip_cov`` and ``kl_cov`` need, and ``sample_size`` its ``effective_sample_size``, which ``p3o`` needs.

    Raises:
        ValueError: ``clip_cov`` or ``kl_cov`` without ``selected``, or ``p3o`` without ``sample_size``.
    """
    kind, low, high = config.policy_loss, config.clip_low, config.clip_high
    if kind == "clip":
        return clipped(log_ratio, advantages, low, high, dual_clip=config.dual_clip, delta=config.delta)
    if kind == "gspo":
        return clipped(_sequence_mean(log_ratio, mask).expand_as(mask), advantages, low, high, delta=config.delta)
    if kind in ("gspo_token", "gspo_turn"):
        mean = _sequence_mean if kind == "gspo_token" else _turn_mean
        shared = mean(log_ratio, mask).detach()
        return clipped(shared + log_probs - log_probs.detach(), advantages, low, high, delta=config.delta)
    if kind in ("cispo_clip", "cispo_upper", "cispo_cap"):
        least = 1 - low if kind == "cispo_clip" else 0.0
        return _weighted(log_probs, log_ratio, advantages, least, high if kind == "cispo_cap" else 1 + high)
    if kind == "sapo":
        return _sapo(log_ratio, advantages, *config.sapo_temperatures)
    if kind == "vespo":
        return _vespo(log_probs, log_ratio, advantages, mask, *config.vespo_shape)
    if kind == "gmpo":
        return _gmpo(log_ratio, advantages, mask, low, high)
    if kind == "dppo":
        return _dppo(log_probs, log_ratio, advantages, low, high, config.delta)
    if kind == "dro":
        return _dro(log_probs, log_ratio, advantages, config.dro_beta)
    if kind == "p3o":
        if sample_size is None:
            raise ValueError(
                "policy_loss='p3o' and batch.effective_sample_size is None: compute that of the whole optimizer step "
                "first, by rlox_grpo.loss.step_statistics.policy_sample_size"
            )
        return _p3o(log_probs, log_ratio, advantages, sample_size)
    if kind in ("clip_cov", "kl_cov"):
        if selected is None:
            raise ValueError(
                f"policy_loss={kind!r} and batch.covariance_mask is None: select the tokens of the whole optimizer "
                "step first, by rlox_grpo.loss.covariance.covariance_masks"
            )
        if kind == "clip_cov":
            return _clip_cov(log_ratio, advantages, selected, low, high)
        return _kl_cov(log_ratio, advantages, selected, config.covariance_kl_coef)
    return _unclipped(-advantages * log_probs, log_ratio.exp())  # reinforce


def top_entropy_masks(
    entropies: Sequence[Tensor], masks: Sequence[Tensor], share: float, ranks: Ranks | None = None
) -> list[Tensor]:
    """Select the loss tokens with the highest entropy ("Beyond the 80/20 Rule", arXiv:2506.01939).

    Args:
        entropies: ``[N, T]`` of each micro-batch of an optimizer step; they share one threshold.
        masks: Their loss masks.
        share: Share of all loss tokens to keep, by linear interpolation between entropies, as in TRL
            (``top_entropy_quantile``).
        ranks: The ranks that have the step's other micro-batches.

    Returns:
        ``bool [N, T]`` for each, the tokens at or above the 1 − share quantile.
    """
    kept = torch.cat([entropy[mask].detach().double() for entropy, mask in zip(entropies, masks, strict=True)])
    parts = (ranks or Ranks()).gather_bytes(kept.cpu().numpy().tobytes())
    kept = torch.from_numpy(np.concatenate([np.frombuffer(part) for part in parts])).to(kept.device)
    if not kept.numel():
        return [mask.clone() for mask in masks]
    # Not torch.quantile: it refuses more than 16 million values.
    ordered = kept.sort().values
    place = (1 - share) * (len(ordered) - 1)
    threshold = torch.lerp(ordered[floor(place)], ordered[ceil(place)], place - floor(place))
    return [(entropy >= threshold) & mask for entropy, mask in zip(entropies, masks, strict=True)]


def clipped(
    log_ratio: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    *,
    dual_clip: float | None = None,
    delta: float | None = None,
) -> PolicyTerm:
    """−min(r A, clip(r, 1 − clip_low, 1 + clip_high) A): PPO's (arXiv:1707.06347, eq. 7; DeepSeekMath eq. 3).

    With ``dual_clip`` c the loss of a token with A < 0 is at most −c A (arXiv:1912.09729). With ``delta`` the
    first r, and not the second, is at most delta (INTELLECT-2, arXiv:2505.07291; TRL).

    ``gspo``: r is the sequence's s_i = exp(Σ log_ratio / L_i), and each token gets 1/L_i of its gradient (GSPO,
    arXiv:2507.18071; TRL's ``importance_sampling_level="sequence"``). ``gspo_token``: r is sg(s_i) ·
    exp(log_probs − sg(log_probs)) (GSPO-token in the paper; verl's ``gspo``). Their values and gradients are equal over
    a whole sequence; they differ with a ``policy_mask`` of single tokens. ``gspo_turn``: ``gspo_token`` with the mean
    over the turn in place of the sequence (GAGPO's action-level ratio, arXiv:2605.13217). ``gspo`` with
    ``sequence_sum`` is LUSPO (arXiv:2602.05261).
    """
    ratio = log_ratio.exp()
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    loss = -torch.minimum(bounded * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    high = (ratio > 1 + clip_high) & (advantages > 0)
    if delta is not None:
        high = high | ((ratio > delta) & (advantages < 0))
    if dual_clip is not None:
        limit = -dual_clip * advantages
        over = (advantages < 0) & (loss > limit)
        loss, high = torch.where(over, limit, loss), high | over
    return PolicyTerm(loss, ratio, (ratio < 1 - clip_low) & (advantages < 0), high)


def _weighted(log_probs: Tensor, log_ratio: Tensor, advantages: Tensor, low: float, high: float) -> PolicyTerm:
    """−sg(clip(r, low, high)) A log_probs, CISPO: the weight is clipped, and every token keeps a gradient.

    Three published meanings: ``cispo_clip`` clips at 1 − clip_low and 1 + clip_high (MiniMax-M1, arXiv:2506.13585;
    verl); ``cispo_upper`` at 1 + clip_high alone (open-instruct); ``cispo_cap`` at clip_high itself, which
    is then about 5 (TRL).
    """
    ratio = log_ratio.exp()
    return PolicyTerm(-ratio.detach().clamp(low, high) * advantages * log_probs, ratio, ratio < low, ratio > high)


def _sapo(log_ratio: Tensor, advantages: Tensor, positive: float, negative: float) -> PolicyTerm:
    """−(4/τ) sigmoid(τ (r − 1)) A, τ by the sign of A (SAPO, arXiv:2511.20347; TRL; verl)."""
    ratio = log_ratio.exp()
    temperature = _by_sign(advantages > 0, positive, negative, ratio)
    return _unclipped(-torch.sigmoid(temperature * (ratio - 1)) * (4 / temperature) * advantages, ratio)


def _vespo(
    log_probs: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    k_positive: float,
    lambda_positive: float,
    k_negative: float,
    lambda_negative: float,
) -> PolicyTerm:
    """−sg(φ(w)) A log_probs with φ(w) = exp(λ) wᵏ exp(−λ w) and w = exp(Σ log_ratio) (VESPO, arXiv:2602.10693; TRL).

    k and λ depend on the sign of A; w is clamped to 1e-8 … exp(20), as in the paper's code.
    """
    log_weight = torch.where(mask, log_ratio, 0).sum(dim=-1, keepdim=True).detach().clamp(log(1e-8), 20.0)  # [N, 1]
    k = _by_sign(advantages >= 0, k_positive, k_negative, log_ratio)
    rate = _by_sign(advantages >= 0, lambda_positive, lambda_negative, log_ratio)
    phi = (rate + k * log_weight - rate * log_weight.exp()).exp()
    return _unclipped(-phi * advantages * log_probs, log_ratio.exp())


def _gmpo(log_ratio: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float) -> PolicyTerm:
    """−A exp(Σ c / L_i), c the log-ratio clipped pessimistically to −clip_low … clip_high (GMPO, arXiv:2507.20673).

    The bounds apply to the log-ratio; the paper uses 0.4 and 0.4. It is one loss for a sequence, so it needs
    ``loss_aggregation="sequence_mean"``.
    """
    sign = advantages.sign()
    bounded = log_ratio.clamp(-clip_low, clip_high)
    pessimistic = torch.where(sign >= 0, torch.minimum(log_ratio, bounded), torch.maximum(log_ratio, bounded))
    ratio = _sequence_mean(pessimistic, mask).exp()
    low, high = (log_ratio < -clip_low) & (sign < 0), (log_ratio > clip_high) & (sign > 0)
    return PolicyTerm((-advantages * ratio).expand_as(mask), log_ratio.exp(), low, high)


def _dppo(
    log_probs: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    delta: float | None,
) -> PolicyTerm:
    """−sg(min(r, delta)) A log_probs for tokens whose probability has moved by less than the bounds.

    Tokens with A > 0 are masked once π − π_old > clip_high, the others once π − π_old < −clip_low (DPPO with the
    binary total variation, arXiv:2602.04879; verl's ``dppo_tv``).
    """
    ratio = log_ratio.exp()
    moved = log_probs.detach().exp() - (log_probs - log_ratio).detach().exp()
    high, low = (moved > clip_high) & (advantages > 0), (moved < -clip_low) & (advantages <= 0)
    weight = ratio.detach() if delta is None else ratio.detach().clamp(max=delta)
    return PolicyTerm(torch.where(low | high, 0, -weight * advantages * log_probs), ratio, low, high)


def _dro(log_probs: Tensor, log_ratio: Tensor, advantages: Tensor, beta: float | None) -> PolicyTerm:
    """−A log_probs + β/2 log_ratio²: direct reward optimisation (DRO, arXiv:2405.19107; verl's ``dro``).

    As in verl, the penalty of a token is against the old policy.
    """
    if beta is None:
        raise ValueError("policy_loss='dro' and dro_beta is None: set dro_beta, such as 0.1")
    return _unclipped(-advantages * log_probs + 0.5 * beta * log_ratio.square(), log_ratio.exp())


def _p3o(log_probs: Tensor, log_ratio: Tensor, advantages: Tensor, sample_size: float) -> PolicyTerm:
    """−sg(min(r, e)) A log_probs + (1 − e)·(1/r + log_ratio − 1), e the effective sample size of the step's ratios.

    Trust the Batch (arXiv:2605.12380, eq. 11 and 12; FeynRL, algs/P3O). The penalty estimates KL(π ‖ π_old).
    """
    ratio = log_ratio.exp()
    distance = (-log_ratio).exp() + log_ratio - 1
    loss = -ratio.detach().clamp(max=sample_size) * advantages * log_probs + (1 - sample_size) * distance
    return PolicyTerm(loss, ratio, torch.zeros_like(ratio, dtype=torch.bool), ratio > sample_size)


def _clip_cov(log_ratio: Tensor, advantages: Tensor, selected: Tensor, clip_low: float, clip_high: float) -> PolicyTerm:
    """:func:`clipped`, and 0 for the selected tokens: clip-cov (arXiv:2505.22617; verl's ``clip_cov``)."""
    term = clipped(log_ratio, advantages, clip_low, clip_high)
    return PolicyTerm(torch.where(selected, 0, term.loss), term.ratio, term.low, term.high)


def _kl_cov(log_ratio: Tensor, advantages: Tensor, selected: Tensor, kl_coef: float) -> PolicyTerm:
    """−r A, and + kl_coef · |log_ratio| for the selected tokens: kl-cov (arXiv:2505.22617; verl's ``kl_cov``).

    Nothing is clipped. In the first optimizer step of a batch the log-ratio is 0 and the penalty has no gradient.
    """
    ratio = log_ratio.exp()
    penalty = torch.where(selected, kl_coef * log_ratio.abs(), 0)
    return _unclipped(-ratio * advantages + penalty, ratio)


def _by_sign(condition: Tensor, where_true: float, where_false: float, like: Tensor) -> Tensor:
    """Select between two numbers in the dtype of ``like``; torch.where of two plain numbers gives float32."""
    return torch.where(condition, like.new_tensor(where_true), like.new_tensor(where_false))


def _unclipped(loss: Tensor, ratio: Tensor) -> PolicyTerm:
    nowhere = torch.zeros_like(loss, dtype=torch.bool)
    return PolicyTerm(loss, ratio, nowhere, nowhere)


def _sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of each row under the mask, ``[N, 1]``; 0 for an empty row."""
    kept = torch.where(mask, values, 0)
    return kept.sum(dim=-1, keepdim=True) / mask.sum(dim=-1, keepdim=True).clamp(min=1)


def _turn_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return at each token under the mask the mean of its turn, ``[N, T]``; 0 elsewhere.

    A turn is a run of consecutive tokens under the mask: observations are not under it.
    """
    begins = mask.clone()
    begins[:, 1:] &= ~mask[:, :-1]
    turn = torch.where(mask, begins.cumsum(dim=-1), 0)  # [N, T], from 1; 0 outside the mask
    sums = values.new_zeros(mask.shape[0], mask.shape[1] + 1)
    counts = sums.scatter_add(1, turn, mask.to(values.dtype))
    sums = sums.scatter_add(1, turn, torch.where(mask, values, 0))
    return torch.where(mask, (sums / counts.clamp(min=1)).gather(1, turn), 0)
