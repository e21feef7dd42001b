"""Log-probs of sampled tokens and the exact KL of two models' next-token distributions, in tiles.

KL(p ‖ q) = Σ p (log p − log q) = E_p[z − y] − log Z_p + log Z_q for logits z of p and y of q. One pass over the
vocabulary computes the sums of log-probs, entropies and KL online (arXiv:1805.02867), so each output layer runs once
for all three. Backward adds their gradients by the logits, d KL / d z = p (log p − log q − KL) among them, before the
products of the output layer, which are most of the work.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlox_grpo.model.log_probs import (
    StoredLogits,
    TileGradients,
    Tiles,
    TileSettings,
    count_stored_tokens,
    refuse_unknown_ids,
    tile_shape,
)
from rlox_grpo.model.tile_columns import Columns, exclude_ids, sort_by_size
from rlox_grpo.types import SamplingMask, TokenDistributions


def token_log_probs_and_kl(
    policy: TokenDistributions,
    reference: TokenDistributions,
    token_ids: Tensor,
    *,
    temperature: float = 1.0,
    with_entropy: bool = True,
    entropy_gradient: bool = False,
    tile: tuple[int, int] | None = None,
    stored_bytes: int | None = None,
    sampling_mask: SamplingMask[Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs and entropies as :func:`.token_log_probs` does, and KL(policy ‖ reference) at each token.

    Args:
        policy: the distributions of M tokens; gradients flow to hidden states and head.
        reference: the reference's distributions, of the same tokens and vocabulary, with a head if the policy has
            one. The reference gets no gradient.
        token_ids: ``int64 [M]``.
        temperature: positive, for both.
        with_entropy: whether to compute entropies; they are zeros otherwise.
        entropy_gradient: whether gradients flow through the entropies too.
        tile: tokens and vocabulary rows for which logits exist at a time; None:
            :func:`rlox_grpo.model.log_probs.tile_shape`. Without heads, all logits exist already.
        stored_bytes: memory for logits of the policy that the backward pass does not compute again; see
            :func:`.token_log_probs`.
        sampling_mask: the ids over which both distributions of each token are normalised, sizes ``int64 [M]``; None:
            all ids.

    Returns:
        Three tensors ``float32 [M]`` in nats, or float64 for float64 ``hidden``: log-probs, entropies, and the KL,
        which is never negative.

    Raises:
        ValueError: numbers of tokens or vocabulary rows that differ, a head on only one side, or a token id outside
            the vocabulary.
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
        log_probs = log_p.gather(-1, token_ids[:, None]).squeeze(-1)
        with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_gradient):
            entropy = -torch.linalg.vecdot(log_p.exp(), log_p) if with_entropy else torch.zeros_like(log_probs)
        return log_probs, entropy, (log_p.exp() * (log_p - log_q.detach())).sum(dim=-1)
    vocabulary = shapes[0][1]
    refuse_unknown_ids(token_ids, vocabulary)
    tile = tile_shape(vocabulary, policy.hidden.device) if tile is None else tile
    settings = TileSettings.from_head(
        policy.head,
        temperature,
        tile,
        with_entropy=with_entropy,
        entropy_gradient=entropy_gradient,
        stored_tokens=count_stored_tokens(policy.hidden, policy.head, stored_bytes),
    )
    ref_settings = TileSettings.from_head(reference.head, temperature, tile)
    hidden, ref_hidden, order = policy.hidden, reference.hidden, None
    if sampling_mask is not None:
        order, sampling_mask = sort_by_size(sampling_mask)
        hidden, ref_hidden, token_ids = hidden[order], ref_hidden[order], token_ids[order]
    outputs: tuple[Tensor, Tensor, Tensor] = _TiledComparison.apply(  # type: ignore[no-untyped-call]
        *(hidden, policy.head.weight, policy.head.bias),
        *(ref_hidden, reference.head.weight, reference.head.bias),
        *(token_ids, settings, ref_settings, sampling_mask),
    )
    if order is None:
        return outputs
    position = order.argsort()  # int64 [M], where each token was
    return outputs[0][position], outputs[1][position], outputs[2][position]


class _TiledComparison(torch.autograd.Function):
    """Forward saves four numbers per token, both log normalisers, entropy and KL, and logits of the policy."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        hidden, weight, bias, *reference, token_ids, settings, ref_settings, mask = arguments
        ref_hidden, ref_weight, ref_bias = reference
        tiles = Tiles(hidden, weight, bias, settings, mask)
        other = Tiles(ref_hidden, ref_weight, ref_bias, ref_settings)
        # Five tensors [M].
        log_probs = torch.empty(hidden.shape[0], dtype=tiles.dtype, device=hidden.device)
        log_normalisers, ref_log_normalisers = torch.empty_like(log_probs), torch.empty_like(log_probs)
        entropy, kl = torch.zeros_like(log_probs), torch.empty_like(log_probs)
        stored, scratch, weights = StoredLogits(tiles.allocate_logits()), tiles.buffer(), tiles.buffer()
        for rows in tiles.token_slices():
            # Each sum is float64 [m].
            mine, theirs = _OnlineSums(log_probs[rows]), _OnlineSums(log_probs[rows])
            taken = torch.zeros_like(log_probs[rows])  # the logits of the tokens
            for columns in tiles.columns(rows):
                # Logits [m, v] of both models, in two buffers that the next tile overwrites.
                logits, ref_logits = tiles.logits(rows, columns), other.logits(rows, columns).to(tiles.dtype)
                if (copy := stored.next_tile(len(taken), len(columns))) is not None:
                    copy.copy_(logits)
                column, inside = columns.find(token_ids[rows])
                taken = torch.where(inside, logits.gather(1, column).squeeze(1), taken)
                shape = logits.shape
                gaps = torch.sub(logits, ref_logits, out=scratch[: logits.numel()].view(shape))
                room = weights[: logits.numel()].view(shape)
                mine.add(columns, logits, room, gaps=gaps, with_entropy=settings.with_entropy)
                theirs.add(columns, ref_logits, room)
            log_normaliser, ref_log_normaliser = mine.log_normaliser(), theirs.log_normaliser()
            log_probs[rows] = (taken.double() - log_normaliser).to(tiles.dtype)
            if settings.with_entropy:  # H = log Z − Σ p · logit, both relative to the top
                entropy[rows] = (mine.mass.log() - mine.fall_moment / mine.mass).to(tiles.dtype)
            # Rounding can give slightly negative values where the distributions are almost equal.
            gap = mine.gap_moment / mine.mass - log_normaliser + ref_log_normaliser
            kl[rows] = gap.clamp(min=0).to(tiles.dtype)
            log_normalisers[rows] = log_normaliser.to(tiles.dtype)
            ref_log_normalisers[rows] = ref_log_normaliser.to(tiles.dtype)
        ctx.save_for_backward(
            *(hidden, weight, bias, *reference, token_ids),
            *(log_normalisers, ref_log_normalisers, entropy, kl, stored.flat),
        )
        ctx.settings = settings, ref_settings, mask
        if not settings.entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy, kl

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        grad_log_probs, grad_entropy, grad_kl = grad_outputs
        hidden, weight, bias, *reference, token_ids, log_normalisers, ref_log_normalisers, entropy, kl, flat = (
            ctx.saved_tensors
        )
        settings, ref_settings, mask = ctx.settings
        ref_hidden, ref_weight, ref_bias = reference
        tiles = Tiles(hidden, weight, bias, settings, mask)
        other = Tiles(ref_hidden, ref_weight, ref_bias, ref_settings)
        gradients = TileGradients(tiles, (hidden, weight, bias), ctx.needs_input_grad[:3])
        stored, scratch = StoredLogits(flat), tiles.buffer() if settings.entropy_gradient else None
        for rows in tiles.token_slices():
            # [m, 1] each: d loss / d log p and d loss / d KL, times the factor of a logit over the layer's product.
            grad, kl_grad = (values[rows, None] * settings.factor for values in (grad_log_probs, grad_kl))
            for columns in tiles.columns(rows):
                logits = stored.next_tile(len(grad), len(columns))
                logits = tiles.logits(rows, columns) if logits is None else logits
                ref_logits = other.logits(rows, columns).to(tiles.dtype)
                # The slope is computed before the logits become log-probs in the same buffer.
                slope = None if settings.softcap is None else tiles.softcap_slope(logits)
                column, inside = columns.find(token_ids[rows])
                # The result goes into the tile's buffer, so that stored logits are not changed.
                log_p = torch.sub(logits, log_normalisers[rows, None], out=tiles.room(logits))
                log_q = ref_logits.sub_(ref_log_normalisers[rows, None])
                # d loss / d logit = p · (kl_grad · (log p − log q − KL) − grad − entropy_grad · (log p + H)), plus grad
                # at the token itself. It is computed in the two buffers: a new tile costs more than its arithmetic.
                p_slope = torch.sub(log_p, log_q, out=log_q).sub_(kl[rows, None]).mul_(kl_grad).sub_(grad)
                if scratch is not None:
                    entropy_grad = grad_entropy[rows, None] * settings.factor
                    surprise = torch.add(log_p, entropy[rows, None], out=scratch[: log_p.numel()].view_as(log_p))
                    p_slope.sub_(surprise.mul_(entropy_grad))
                grad_logits = columns.exp_(log_p, out=log_p).mul_(p_slope)
                grad_logits.scatter_add_(1, column, torch.where(inside[:, None], grad, 0))
                gradients.add(rows, columns, grad_logits if slope is None else grad_logits.mul_(slope))
        # There is no gradient for the reference's hidden states, weight and bias, the ids, both settings and the mask.
        return (*gradients.sums(), *[None] * 7)


class _OnlineSums:
    """Sums of exp(logit − top) times 1, a gap and logit − top over the tiles of a vocabulary; top: the largest logit.

    Example: tiles of the logits ``1`` and ``3``. After the first, top is 1 and the first sum is 1. The second raises
    top to 3, so the sum is rescaled and becomes e⁻² · 1 + 1.
    """

    def __init__(self, like: Tensor) -> None:
        self._top = torch.full_like(like, -torch.inf)
        self.mass = torch.zeros_like(like, dtype=torch.float64)
        self.gap_moment, self.fall_moment = torch.zeros_like(self.mass), torch.zeros_like(self.mass)

    def add(
        self,
        columns: Columns,
        logits: Tensor,
        room: Tensor,
        *,
        gaps: Tensor | None = None,
        with_entropy: bool = False,
    ) -> None:
        """Add a tile.

        Args:
            columns: the columns of the tile.
            logits: ``[m, v]``; overwritten.
            room: a buffer ``[m, v]``; overwritten.
            gaps: ``[m, v]``, the factors of the second sum; overwritten; None: this sum stays 0.
            with_entropy: whether to compute the third sum.
        """
        higher = torch.maximum(self._top, logits.amax(dim=-1))
        fall = (self._top - higher).double()  # −inf at first, when there is no mass to move
        scale = fall.exp()
        shifted = logits.sub_(higher[:, None])
        weights = columns.exp_(shifted, out=room)
        if gaps is not None:
            moment = gaps.mul_(weights).sum(dim=-1, dtype=torch.float64)
            self.gap_moment = scale * self.gap_moment + moment
        if with_entropy:
            moved = scale * (self.fall_moment + torch.where(self.mass > 0, fall * self.mass, 0))
            self.fall_moment = moved + shifted.mul_(weights).sum(dim=-1)
        self.mass = scale * self.mass + weights.sum(dim=-1, dtype=torch.float64)
        self._top = higher

    def log_normaliser(self) -> Tensor:
        """``float64 [m]``."""
        return self._top.double() + self.mass.log()


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return torch.log_softmax(logits / temperature, dim=-1)
