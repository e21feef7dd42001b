"""The optimal token baseline: one baseline for each token position of a group (OTB, arXiv:2602.07078).

The variance of a policy gradient is smallest for the baseline B_t = E[W_t G] / E[W_t], where W_t is the squared norm
of the score up to token t, and G is the return. W_t is computed from the forward pass, as the sum over the tokens up
to t of 1 − 2 p[y] + Σ p², which is the squared norm of the score with respect to the logits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlox_grpo.distributed.ranks import Ranks
from rlox_grpo.types import Batch, Float32Array

_EPSILON = 1e-8
"""Number that is added to Σ W, as in verl."""


def optimal_token_advantages(
    rewards: NDArray[np.float64], norms: Sequence[NDArray[np.float64]]
) -> list[NDArray[np.float64]]:
    """Return the advantage of each token of one group: A_it = R_i − Σ_j W_jt R_j / (Σ_j W_jt + 1e-8).

    W_jt is the sum of the norms of row j's first t tokens. Rows without a token t are not in the sums. As in verl,
    the baseline is 0 if fewer than two rows have a token t.

    Example: rewards ``1 0``, norms ``1 1`` and ``3``. Token 1 has W = 1 and 3, so its baseline is 1/4. Token 2 exists
    only in the first row: its baseline is 0. The advantages are ``0.75 1`` and ``-0.25``, up to 1e-8.

    Args:
        rewards: ``[G]``.
        norms: for each row, the squared norm of the score of each of its tokens, from
            :func:`rlox_grpo.model.log_probs.score_norms`.
    """
    lengths = np.array([len(row) for row in norms])
    width = int(lengths.max(initial=0))
    # float64 [G, T], W. In the example 1 2 | 3 _, the sums of norms up to each token.
    energy = np.zeros((len(norms), width))
    for row, values in zip(energy, norms, strict=True):
        row[: len(values)] = np.cumsum(values)
    # bool [G, T], tokens that the rows have.
    reached = np.arange(width) < lengths[:, None]
    energy[~reached] = 0.0
    # [T]. In the example (1 · 1 + 3 · 0) / (1 + 3) = 1/4 for token 1; token 2 is in one row, and gets 0 below.
    baseline = (energy * rewards[:, None]).sum(axis=0) / (energy.sum(axis=0) + _EPSILON)
    baseline[reached.sum(axis=0) < 2] = 0.0
    return [reward - baseline[:length] for reward, length in zip(rewards, lengths, strict=True)]


def with_token_advantages(
    mini_batches: Sequence[Sequence[Batch]],
    norms: Sequence[Sequence[Tensor]],
    rewards: Float32Array,
    group_offsets: NDArray[np.int64],
    ranks: Ranks | None = None,
) -> list[list[Batch]]:
    """Replace the advantages of micro-batches by those of :func:`optimal_token_advantages`, ``float32 [N, T]``.

    Baselines are computed over whole groups, even if the rows of a group are in several micro-batches or on several
    ranks. The tokens of an episode with branches are those of its rows, one row after the other. A completion whose
    reward is NaN is in no baseline, and its advantages are 0.

    Args:
        mini_batches: the micro-batches of each mini-batch.
        norms: for each micro-batch, the norms ``[M]`` of the tokens under ``loss_mask``, in row order.
        rewards: ``[N]`` of the whole step, prompt-major.
        group_offsets: ``int64 [B + 1]``.
        ranks: the ranks that have the step's other micro-batches; every rank calls this.
    """
    ranks = ranks or Ranks()
    batch_rows = [
        _read_rows(*pair)
        for mini_batch, mini_batch_norms in zip(mini_batches, norms, strict=True)
        for pair in zip(mini_batch, mini_batch_norms, strict=True)
    ]
    # Four arrays for each rank: the numbers of its rows, their branches, their lengths, and the norms of all their
    # tokens.
    columns = [
        np.concatenate([np.zeros(0), *(batch[column_index] for batch in batch_rows)]) for column_index in range(4)
    ]
    numbers, branches, lengths, values = (
        np.concatenate([np.frombuffer(data) for data in ranks.gather_bytes(column.tobytes())]) for column in columns
    )
    # End of each row's norms among all norms; the arrays have the rows of every rank, micro-batch by micro-batch.
    ends = np.cumsum(lengths.astype(np.int64))
    # Completion → branch → the norms of the tokens of this row.
    norms_by_row: dict[int, dict[int, NDArray[np.float64]]] = defaultdict(dict)
    for number, branch, length, end in zip(numbers, branches, lengths, ends, strict=True):
        if length > 0 and not np.isnan(rewards[int(number)]):
            norms_by_row[int(number)][int(branch)] = values[end - int(length) : end]
    advantages: dict[tuple[int, int], NDArray[np.float64]] = {}
    for start, stop in pairwise(group_offsets.tolist()):
        # Completions without loss tokens, and those of a reward NaN, are in no baseline.
        rows = [row for row in range(start, stop) if row in norms_by_row]
        by_branch = [dict(sorted(norms_by_row[row].items())) for row in rows]
        row_norms = [np.concatenate([*branch_norms.values()]) for branch_norms in by_branch]
        token_advantages = optimal_token_advantages(rewards[rows].astype(np.float64), row_norms)
        for row, branch_norms, row_advantages in zip(rows, by_branch, token_advantages, strict=True):
            bounds = np.cumsum([len(branch_row) for branch_row in branch_norms.values()])[:-1]
            for branch, branch_advantages in zip(branch_norms, np.split(row_advantages, bounds), strict=True):
                advantages[row, branch] = branch_advantages
    return [[_with_advantages(batch, advantages) for batch in mini_batch] for mini_batch in mini_batches]


def _read_rows(batch: Batch, norms: Tensor) -> list[NDArray[np.float64]]:
    """Row numbers, branches, loss tokens of each row, and norms times squared importance weights, as in verl."""
    mask = batch.loss_mask
    if batch.policy.importance is not None:
        # The importance weight is a factor of the gradient, so its square is a factor of the squared norm.
        norms = norms * batch.policy.importance[mask] ** 2
    tensors = (batch.row_index, _number_branches(batch), mask.sum(dim=-1), norms)
    return [tensor.detach().cpu().double().numpy() for tensor in tensors]


def _number_branches(batch: Batch) -> Tensor:
    """Return the branch of each row, ``int64 [N]``; 0 for a completion itself."""
    return torch.zeros_like(batch.row_index) if batch.branches is None else batch.branches.index


def _with_advantages(batch: Batch, advantages: dict[tuple[int, int], NDArray[np.float64]]) -> Batch:
    mask = batch.loss_mask
    replaced = torch.zeros(mask.shape, dtype=torch.float32)
    keys = zip(batch.row_index.tolist(), _number_branches(batch).tolist(), strict=True)
    for row, (key, row_mask) in enumerate(zip(keys, mask.cpu(), strict=True)):
        if key in advantages and row_mask.any():  # a dummy batch repeats rows, without a token of them
            replaced[row, row_mask] = torch.from_numpy(advantages[key]).float()
    return replace(batch, advantages=replaced.to(mask.device))
