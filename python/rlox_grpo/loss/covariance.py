"""Selection of tokens by the covariance of log-prob and advantage: clip-cov and kl-cov (arXiv:2505.22617).

A policy-gradient step lowers the entropy by the covariance of log-probs and advantages, to which few tokens contribute
most. ``policy_loss="clip_cov"`` excludes some of these tokens from the policy term; ``"kl_cov"`` penalises their
distance from the old policy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlox_grpo.config.records.loss import LossConfig
from rlox_grpo.distributed.ranks import Ranks
from rlox_grpo.types import Batch

SELECTING = ("clip_cov", "kl_cov")
"""The policy losses that need :attr:`rlox_grpo.types.Batch.covariance_mask`."""


def covariance_masks(
    log_probs: Sequence[Tensor],
    batches: Sequence[Batch],
    config: LossConfig,
    *,
    seed: Sequence[int] = (0,),
    ranks: Ranks | None = None,
) -> list[Tensor]:
    """Select tokens of an optimizer step: ``bool [N, T]`` for each micro-batch.

    A token's covariance is (log π − mean log π)(A − mean A); means run over all loss tokens of the step. Of n
    loss tokens, s = max(1, ⌊covariance_share · n⌋) are selected:

    - ``kl_cov``: the s with the largest covariances;
    - ``clip_cov``: s drawn at random, without replacement, from the tokens whose covariance lies between the
      ``covariance_bounds`` and whose ratio is not clipped; fewer where there are fewer.

    Means, s and the selection are those of the whole step: of every micro-batch and rank, whatever their layout. verl
    and the authors' code compute them in each micro-batch.

    Args:
        log_probs: ``[N, T]`` of each micro-batch, of the policy before the step; no gradient is taken.
        batches: the micro-batches, with their advantages; without ``old_log_probs`` no ratio is clipped.
        config: the kind of selection and its options.
        seed: seed of the draw of ``clip_cov``, the same on every rank.
        ranks: the ranks that have the step's other micro-batches; every rank calls this.
    """
    ranks = ranks or Ranks()
    parts = [_read_tokens(*pair, config) for pair in zip(log_probs, batches, strict=True)]
    # float64 [5, tokens]: row of the step, place in the row, log-prob, advantage, whether the ratio is clipped.
    own: NDArray[np.float64] = np.concatenate(parts, axis=1) if parts else np.zeros((5, 0))
    gathered = ranks.gather_bytes(own.tobytes())
    tokens = np.concatenate([np.frombuffer(part).reshape(5, -1) for part in gathered], axis=1)
    # In the order of the step's rows, which does not depend on ranks or micro-batches.
    order = np.lexsort((tokens[1], tokens[0]))
    ordered = np.zeros(tokens.shape[1], dtype=bool)
    ordered[_select(tokens[:, order], config, seed)] = True
    chosen = np.zeros_like(ordered)
    chosen[order] = ordered
    start = sum(len(part) // own.itemsize // 5 for part in gathered[: ranks.rank])
    masks = []
    for batch in batches:
        mask = torch.zeros_like(batch.loss_mask)
        count = int(batch.loss_mask.sum())
        mask[batch.loss_mask] = torch.from_numpy(chosen[start : start + count]).to(mask.device)
        masks.append(mask)
        start += count
    return masks


def _select(tokens: NDArray[np.float64], config: LossConfig, seed: Sequence[int]) -> NDArray[np.int64]:
    """Places of the selected ones of ``tokens [5, n]``."""
    _, _, log_probs, advantages, clipped = tokens
    if not len(log_probs):
        return np.zeros(0, dtype=np.int64)
    covariances = (log_probs - log_probs.mean()) * (advantages - advantages.mean())
    size = max(1, int(config.covariance_share * len(covariances)))
    if config.policy_loss == "kl_cov":
        return np.argsort(-covariances, kind="stable")[:size]
    low, high = config.covariance_bounds
    candidates = np.flatnonzero((covariances > low) & (covariances < high) & (clipped == 0))
    # A random number for each token, not a permutation of the candidates: if rounding moves one token over a bound, the
    # draws of the other tokens stay the same.
    lots = np.random.default_rng(list(seed)).random(len(covariances))[candidates]
    return candidates[np.argsort(lots, kind="stable")[:size]]


def _read_tokens(log_probs: Tensor, batch: Batch, config: LossConfig) -> NDArray[np.float64]:
    """``float64 [5, n]`` of the n loss tokens of a micro-batch, in row order; see :func:`covariance_masks`."""
    mask = batch.loss_mask
    now = log_probs.detach()[mask].double()
    advantages = batch.advantages if batch.advantages.dim() == 2 else batch.advantages[:, None].expand(mask.shape)
    gains = advantages[mask].double()
    clipped = torch.zeros_like(now)
    if batch.old_log_probs is not None:
        ratio = (now - batch.old_log_probs[mask].double()).exp()
        over, under = ratio > 1 + config.clip_high, ratio < 1 - config.clip_low
        clipped = ((over & (gains > 0)) | (under & (gains < 0))).double()
    rows, places = mask.nonzero(as_tuple=True)
    numbers = batch.row_index.to(rows.device)[rows].double()
    return torch.stack([numbers, places.double(), now, gains, clipped]).cpu().numpy()
