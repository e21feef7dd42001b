"""Losses of the routers of a mixture of experts, as one micro-batch's share of the optimizer step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def balance_loss(logits: Sequence[Tensor], load: Tensor, num_loss_tokens: float) -> Tensor:
    """Return the mean over layers of E · Σ_i f_i P_i (Switch Transformer, arXiv:2101.03961, eq. 4 to 6).

    f_i is the share of tokens routed to expert i, P_i the mean probability of expert i. With k experts for each token
    the f_i add up to k, as in Mixtral and OLMoE, and balanced experts have the loss k. f has no gradient. The share f
    is that of the whole optimizer step (arXiv:2501.11873), so that the parts of micro-batches and ranks add up to the
    loss of the step.

    Args:
        logits: for each layer the router's logits of the micro-batch's loss tokens, ``[M, E]`` with gradient.
        load: f of the whole optimizer step, ``float64 [layers, E]``.
        num_loss_tokens: loss tokens of the whole optimizer step.
    """
    experts = load.shape[-1]
    layers = [
        experts * (share * torch.softmax(scores.double(), dim=-1).sum(dim=0)).sum()
        for scores, share in zip(logits, load, strict=True)
    ]
    return torch.stack(layers).mean() / max(num_loss_tokens, 1.0)


def z_loss(logits: Sequence[Tensor], num_loss_tokens: float) -> Tensor:
    """Return the mean over layers and loss tokens of (log Σ_i exp x_i)² (ST-MoE, arXiv:2202.08906, eq. 5).

    The arguments are those of :func:`balance_loss`.
    """
    layers = [torch.logsumexp(scores.double(), dim=-1).square().sum() for scores in logits]
    return torch.stack(layers).mean() / max(num_loss_tokens, 1.0)
