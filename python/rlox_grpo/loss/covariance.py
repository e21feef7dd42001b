"""Selection of tokens by the covariance of log-prob and advantage: clip-cov and kl-cov (arXiv:2505.22617).

A policy-gradient step lowers the entropy by the covariance of log-probs and advantages, to which few tokens contribute
most. ``policy_loss="clip_cov"`` excludes some of these tokens from the policy term; ``"kl_cov"`` penalises their
distance from the old policy.

A token's covariance is (log π − mean log π)(A − mean A); means run over all loss tokens of the step. Of n loss tokens,
s = max(1, ⌊covariance_share · n⌋) are selected. Means, s and the selection are over the whole step: over every
micro-batch and rank, whatever their layout. verl and the authors' code compute them in each micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlox_grpo.config.records.loss import LossConfig
from rlox_grpo.loss.inputs import LossInputs, StepInputs

_Select: TypeAlias = Callable[[NDArray[np.float64], NDArray[np.float64]], NDArray[np.int64]]
"""Covariances ``[n]`` and whether the ratio is clipped ``[n]`` → the indices of the selected tokens."""


def select_largest(step: StepInputs) -> list[Tensor]:
    """Select the s tokens with the largest covariances: ``bool [N, T]`` for each micro-batch (kl-cov)."""

    def select(covariances: NDArray[np.float64], clipped: NDArray[np.float64]) -> NDArray[np.int64]:
        # The sort is stable: of equal covariances the earlier token of the step is taken, in any layout.
        return np.argsort(-covariances, kind="stable")[: _count_selected(step.options, covariances)]

    return _select_tokens(step, select)


def select_drawn(step: StepInputs) -> list[Tensor]:
    """Draw s tokens at random, without replacement: ``bool [N, T]`` for each micro-batch (clip-cov).

    The candidates are the tokens whose covariance lies between the ``covariance_bounds`` and whose ratio is not
    clipped. If there are fewer than s candidates, all of them are selected.
    """
    low, high = step.options.covariance_bounds

    def select(covariances: NDArray[np.float64], clipped: NDArray[np.float64]) -> NDArray[np.int64]:
        candidates = np.flatnonzero((covariances > low) & (covariances < high) & (clipped == 0))
        # A random number for each token, not a permutation of the candidates: if rounding moves one token over a bound,
        # the draws of the other tokens stay the same.
        lots = np.random.default_rng(list(step.seed)).random(len(covariances))[candidates]
        return candidates[np.argsort(lots, kind="stable")[: _count_selected(step.options, covariances)]]

    return _select_tokens(step, select)


def refuse_missing(policy_loss: str, selected: Any) -> Tensor:
    """Return ``selected``. Raise ValueError if ``selected`` is None."""
    if selected is None:
        raise ValueError(
            f"policy_loss={policy_loss!r} and batch.policy.measured is None: select the tokens of the whole optimizer "
            "step first, by rlox_grpo.loss.step_statistics.with_step_statistics"
        )
    mask: Tensor = selected
    return mask


def _count_selected(options: LossConfig, covariances: NDArray[np.float64]) -> int:
    return max(1, int(options.covariance_share * len(covariances)))


def _select_tokens(step: StepInputs, select: _Select) -> list[Tensor]:
    """Return ``bool [N, T]`` for each micro-batch of this rank, of a selection over the whole step."""
    token_stats = [_read_tokens(inputs) for inputs in step.micro_batches]
    # float64 [6, tokens]: sequence of the step, branch, index in the row, log-prob, advantage, whether the ratio is
    # clipped.
    mine: NDArray[np.float64] = np.concatenate(token_stats, axis=1) if token_stats else np.zeros((6, 0))
    # One array [6, n] for each rank.
    gathered = [values.reshape(6, -1) for values in step.gather(mine.reshape(-1))]
    tokens = np.concatenate(gathered, axis=1)
    # Sort into the order of the step's rows, which does not depend on ranks or micro-batches.
    order = np.lexsort((tokens[2], tokens[1], tokens[0]))
    _, _, _, log_probs, advantages, clipped = tokens[:, order]
    # Example: log-probs -1 -3 -2 and advantages 1 1 -2. The means are -2 and 0, so the covariances are 1 -1 0.
    # bool [tokens] in the order of the step's rows; `chosen` has the same in the order of ranks and micro-batches.
    ordered = np.zeros(tokens.shape[1], dtype=bool)
    if len(ordered):
        ordered[select((log_probs - log_probs.mean()) * (advantages - advantages.mean()), clipped)] = True
    chosen = np.zeros_like(ordered)
    chosen[order] = ordered
    # The number of tokens of earlier ranks. This rank's tokens come after them, micro-batch by micro-batch.
    start = sum(values.shape[1] for values in gathered[: step.ranks.rank])
    masks = []
    for inputs in step.micro_batches:
        mask = torch.zeros_like(inputs.mask)
        count = int(inputs.mask.sum())
        mask[inputs.mask] = torch.from_numpy(chosen[start : start + count]).to(mask.device)
        masks.append(mask)
        start += count
    return masks


def _read_tokens(inputs: LossInputs) -> NDArray[np.float64]:
    """``float64 [6, n]`` of the n loss tokens of a micro-batch, in row order; see :func:`_select_tokens`."""
    mask, options = inputs.mask, inputs.options
    # Six arrays float64 [n]: float64 holds float32 values exactly, so that one array can hold all six.
    now = inputs.log_probs.detach()[mask].double()
    gains = inputs.advantages[mask].double()
    ratio = (now - inputs.old_log_probs[mask].double()).exp()
    # A ratio is clipped as in PPO, if it is past the bound on the side to which the advantage pushes.
    over, under = ratio > 1 + options.clip_high, ratio < 1 - options.clip_low
    clipped = ((over & (gains > 0)) | (under & (gains < 0))).double()
    rows, columns = mask.nonzero(as_tuple=True)
    numbers, branches = (values.to(rows.device)[rows].double() for values in (inputs.sequences, inputs.branches))
    return torch.stack([numbers, branches, columns.double(), now, gains, clipped]).cpu().numpy()
