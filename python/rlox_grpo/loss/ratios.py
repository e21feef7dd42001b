"""Ratios and formulas that several policy losses share.

In every function ``log_ratio [N, T]`` has a gradient and is 0 outside ``mask [N, T]``. r is exp(log_ratio), sg is
detach, and L_i is the number of tokens of row i under the mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlox_grpo.loss.inputs import PolicyTerm, number_turns


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

    With ``dual_clip`` = c, the loss of a token with A < 0 is at most −c A (arXiv:1912.09729). With ``delta``, the
    first r of the formula is at most delta, and the second is unchanged (INTELLECT-2, arXiv:2505.07291; TRL).
    """
    # [N, T]. Example: clip_low = clip_high = 0.2. A = 1 and r = 1.5: min(1.5, 1.2) = 1.2, no gradient. A = -1 and r =
    # 1.5: min(-1.5, -1.2) = -1.5, with gradient: a token that should become rarer is not clipped from above.
    ratio = log_ratio.exp()
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    loss = -torch.minimum(bounded * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    high = (ratio > 1 + clip_high) & (advantages > 0)
    if delta is not None:
        high = high | ((ratio > delta) & (advantages < 0))
    if dual_clip is not None:
        # A = -1, r = 100, c = 3: the loss 100 becomes 3.
        limit = -dual_clip * advantages
        over = (advantages < 0) & (loss > limit)
        loss, high = torch.where(over, limit, loss), high | over
    return PolicyTerm(loss, ratio, (ratio < 1 - clip_low) & (advantages < 0), high)


def weighted(log_probs: Tensor, log_ratio: Tensor, advantages: Tensor, low: float, high: float) -> PolicyTerm:
    """−sg(clip(r, low, high)) A log_probs: the weight is clipped, and every token keeps a gradient (CISPO)."""
    ratio = log_ratio.exp()
    return PolicyTerm(-ratio.detach().clamp(low, high) * advantages * log_probs, ratio, ratio < low, ratio > high)


def select_by_sign(condition: Tensor, where_true: float, where_false: float, like: Tensor) -> Tensor:
    """Select between two numbers in the dtype of ``like``; torch.where of two plain numbers gives float32."""
    return torch.where(condition, like.new_tensor(where_true), like.new_tensor(where_false))


def average_rows(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of each row of ``values [N, T]`` under the mask, ``[N, 1]``; 0 for an empty row."""
    # Example: the mask 1 1 0 and values 1 3 9: the mean is 2.
    return torch.where(mask, values, 0).sum(dim=-1, keepdim=True) / mask.sum(dim=-1, keepdim=True).clamp(min=1)


def average_turns(values: Tensor, mask: Tensor) -> Tensor:
    """Return at each token under the mask the mean of its turn, ``[N, T]``; 0 elsewhere."""
    # Example: the mask 1 1 0 1 and values 1 3 9 5: turns 1 1 0 2, means of the turns 2 and 5, result 2 2 0 5.
    turns = number_turns(mask) + 1  # 0 outside the mask, so that column 0 of the sums takes those tokens
    sums = values.new_zeros(mask.shape[0], mask.shape[1] + 1)  # [N, turns + 1]
    counts = sums.scatter_add(1, turns, mask.to(values.dtype))
    sums = sums.scatter_add(1, turns, torch.where(mask, values, 0))
    return torch.where(mask, (sums / counts.clamp(min=1)).gather(1, turns), 0)
