"""Exact KL of two models' next-token distributions, in tiles, without logits of shape ``[tokens, vocab]``.

KL(p ‖ q) = Σ p (log p − log q) = E_p[z − y] − log Z_p + log Z_q for logits z of p and y of q. One pass over the
vocabulary computes the three sums online (arXiv:1805.02867). Backward takes a second pass: d KL / d z =
p (log p − log q − KL).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlox_grpo.model.log_probs import TileGradients, Tiles, TileSettings, tile_shape
from rlox_grpo.model.tile_columns import exclude_ids, sort_by_size
from rlox_grpo.types import SamplingMask, TokenDistributions


def distribution_kl(
    policy: TokenDistributions,
    reference: TokenDistributions,
    *,
    temperature: float = 1.0,
    tile: tuple[int, int] | None = None,
    sampling_mask: SamplingMask[Tensor] | None = None,
) -> Tensor:
    """KL(policy ‖ reference) of softmax(logits / temperature) at each of M tokens.

    Args:
        policy: the policy's distributions; gradients flow to hidden states and head.
        reference: the reference's distributions, of the same tokens and vocabulary, with a head if the policy has
            one. The reference gets no gradient.
        temperature: positive, for both.
        tile: tokens and vocabulary rows for which logits exist at a time; None:
            :func:`rlox_grpo.model.log_probs.tile_shape`. Without heads, all logits exist already.
        sampling_mask: the ids over which both distributions of each token are normalised, sizes ``int64 [M]``; None:
            all ids.

    Returns:
        The KL in nats, never negative: ``float32 [M]``, or float64 for float64 ``hidden``.

    Raises:
        ValueError: numbers of tokens or vocabulary rows that differ, or a head on only one side.
    """
    if (policy.head is None) != (reference.head is None):
        linear_side = "policy" if policy.head is None else "reference"
        raise ValueError(
            f"the {linear_side}'s logits are not a linear map of its hidden states and the other's are: "
            "their distributions cannot be compared in tiles; use another kl_estimator than 'full'"
        )
    shapes = [
        (side.hidden.shape[0], side.hidden.shape[1] if side.head is None else side.head.weight.shape[0])
        for side in (policy, reference)
    ]
    if shapes[0] != shapes[1]:
        raise ValueError(f"policy has tokens and vocabulary {shapes[0]}, reference {shapes[1]}: they must be equal")
    if policy.head is None or reference.head is None:
        # Without heads, hidden holds the logits [M, V] themselves.
        log_p, log_q = (
            _log_softmax(exclude_ids(side.hidden, sampling_mask), temperature) for side in (policy, reference)
        )
        return (log_p.exp() * (log_p - log_q.detach())).sum(dim=-1)
    tile = tile_shape(shapes[0][1], policy.hidden.device) if tile is None else tile
    settings, ref_settings = (
        TileSettings(head.scale, head.softcap, temperature, False, False, *tile)
        for head in (policy.head, reference.head)
    )
    hidden, ref_hidden, order = policy.hidden, reference.hidden, None
    if sampling_mask is not None:
        order, sampling_mask = sort_by_size(sampling_mask)
        hidden, ref_hidden = hidden[order], ref_hidden[order]
    policy_arguments = (hidden, policy.head.weight, policy.head.bias)
    other = (ref_hidden, reference.head.weight, reference.head.bias)
    kl: Tensor = _TiledKL.apply(*policy_arguments, *other, settings, ref_settings, sampling_mask)  # type: ignore[no-untyped-call]
    return kl if order is None else kl[order.argsort()]


class _TiledKL(torch.autograd.Function):
    """Forward saves three numbers per token: both log normalisers and the KL."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        hidden, weight, bias, *reference, settings, ref_settings, mask = arguments
        ref_hidden, ref_weight, ref_bias = reference
        policy_tiles, other = (
            Tiles(hidden, weight, bias, settings, mask),
            Tiles(ref_hidden, ref_weight, ref_bias, ref_settings),
        )
        kl = torch.empty(hidden.shape[0], dtype=policy_tiles.dtype, device=hidden.device)
        log_normalisers, ref_log_normalisers = torch.empty_like(kl), torch.empty_like(kl)
        scratch = policy_tiles.buffer()
        for rows in policy_tiles.token_slices():
            # mine has Σ e^z and Σ e^z (z - y), whose quotient is E_p[z - y]; theirs has Σ e^y. Each sum is float64 [m].
            mine, theirs = _OnlineSum(kl[rows]), _OnlineSum(kl[rows])
            for columns in policy_tiles.columns(rows):
                # Logits [m, v] of both models, in two buffers that the next tile overwrites.
                logits, ref_logits = (
                    policy_tiles.logits(rows, columns),
                    other.logits(rows, columns).to(policy_tiles.dtype),
                )
                gaps = torch.sub(logits, ref_logits, out=scratch[: logits.numel()].view_as(logits))
                mine.add(logits, gaps)
                theirs.add(ref_logits, None)
            log_normaliser, ref_log_normaliser = mine.log_normaliser(), theirs.log_normaliser()
            # Rounding can give slightly negative values where the distributions are almost equal.
            kl[rows] = (
                (mine.moment / mine.mass - log_normaliser + ref_log_normaliser).clamp(min=0).to(policy_tiles.dtype)
            )
            log_normalisers[rows] = log_normaliser.to(policy_tiles.dtype)
            ref_log_normalisers[rows] = ref_log_normaliser.to(policy_tiles.dtype)
        ctx.save_for_backward(hidden, weight, bias, *reference, log_normalisers, ref_log_normalisers, kl)
        ctx.settings = settings, ref_settings, mask
        return kl

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        hidden, weight, bias, *reference, log_normalisers, ref_log_normalisers, kl = ctx.saved_tensors
        settings, ref_settings, mask = ctx.settings
        ref_hidden, ref_weight, ref_bias = reference
        policy_tiles, other = (
            Tiles(hidden, weight, bias, settings, mask),
            Tiles(ref_hidden, ref_weight, ref_bias, ref_settings),
        )
        gradients = TileGradients(policy_tiles, (hidden, weight, bias), ctx.needs_input_grad[:3])
        for rows in policy_tiles.token_slices():
            grad = grad_outputs[0][rows, None] * settings.factor
            for columns in policy_tiles.columns(rows):
                logits, ref_logits = (
                    policy_tiles.logits(rows, columns),
                    other.logits(rows, columns).to(policy_tiles.dtype),
                )
                # The slope is computed before the logits become log-probs in the same buffer.
                slope = None if settings.softcap is None else policy_tiles.softcap_slope(logits)
                log_p = logits.sub_(log_normalisers[rows, None])
                log_q = ref_logits.sub_(ref_log_normalisers[rows, None])
                # d KL / d logit = p (log p − log q − KL), in the two buffers: a new tile costs more than its arithmetic
                surplus = torch.sub(log_p, log_q, out=log_q).sub_(kl[rows, None])
                grad_logits = log_p.exp_().mul_(surplus).mul_(grad)
                gradients.add(rows, columns, grad_logits if slope is None else grad_logits.mul_(slope))
        # There is no gradient for the reference's hidden states, weight and bias, for both settings and the mask.
        return (*gradients.sums(), *[None] * 6)


class _OnlineSum:
    """Σ exp(logit − top) and Σ exp(logit − top) · value over the tiles of a vocabulary; top is the largest logit.

    Example: tiles of the logits ``1`` and ``3``. After the first, top is 1 and the first sum is 1. The second raises
    top to 3, so the sum is rescaled and becomes e⁻² · 1 + 1.
    """

    def __init__(self, like: Tensor) -> None:
        self._top = torch.full_like(like, -torch.inf)
        self.mass = torch.zeros_like(like, dtype=torch.float64)
        self.moment = torch.zeros_like(self.mass)

    def add(self, logits: Tensor, values: Tensor | None) -> None:
        """Add a tile ``[m, v]``, which is overwritten; without values, only its first sum."""
        higher = torch.maximum(self._top, logits.amax(dim=-1))
        fall = (self._top - higher).double().exp()  # 0 at first
        weights = logits.sub_(higher[:, None]).exp_()
        self.mass = fall * self.mass + weights.sum(dim=-1, dtype=torch.float64)
        if values is not None:
            self.moment = fall * self.moment + weights.mul_(values).sum(dim=-1, dtype=torch.float64)
        self._top = higher

    def log_normaliser(self) -> Tensor:
        """``float64 [m]``."""
        return self._top.double() + self.mass.log()


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return torch.log_softmax(logits / temperature, dim=-1)
