"""Squared norm of the score of sampled tokens, in tiles, without logits of shape ``[tokens, vocab]``.

The gradient of log p[y] by the logits is onehot(y) − p. Its squared norm, 1 − 2 p[y] + Σ p², is a proxy for the squared
norm of the token's gradient (OTB, arXiv:2602.07078).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlox_grpo.model.log_probs import Tiles, TileSettings, find_places, tile_shape
from rlox_grpo.types import TokenDistributions


@torch.no_grad()
def score_norms(
    distributions: TokenDistributions,
    token_ids: Tensor,
    *,
    temperature: float = 1.0,
    tile: tuple[int, int] | None = None,
) -> Tensor:
    """Return 1 − 2 p[y] + Σ p² of p = softmax(logits / temperature) for each token y: ``float32 [M]``, 0 to 2.

    Args:
        distributions: of M tokens; logits where there is no head.
        token_ids: ``int64 [M]``.
        temperature: positive.
        tile: tokens and vocabulary rows for which logits exist at a time; by
            :func:`rlox_grpo.model.log_probs.tile_shape` when None.
    """
    hidden, head = distributions.hidden, distributions.head
    if head is None:
        probs = torch.softmax(hidden.float() / temperature, dim=-1)
        return 1 - 2 * probs.gather(-1, token_ids[:, None]).squeeze(-1) + probs.square().sum(dim=-1)
    tile = tile_shape(head.weight.shape[0], hidden.device) if tile is None else tile
    settings = TileSettings(head.scale, head.softcap, temperature, False, False, *tile)
    tiles = Tiles(hidden.detach(), head.weight.detach(), None if head.bias is None else head.bias.detach(), settings)
    norms = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
    for rows in tiles.token_slices():
        ids = token_ids[rows]
        top = torch.full((len(ids),), -torch.inf, dtype=torch.float64, device=hidden.device)  # largest logit so far
        mass, squares = torch.zeros_like(top), torch.zeros_like(top)  # Σ exp(logit − top), Σ exp(2 (logit − top))
        taken = torch.zeros_like(top)
        for columns in tiles.vocabulary_slices():
            logits = tiles.logits(rows, columns).double()
            place, inside = find_places(ids, columns)
            taken = torch.where(inside, logits.gather(1, place).squeeze(1), taken)
            higher = torch.maximum(top, logits.amax(dim=-1))
            fall, weights = (top - higher).exp(), (logits - higher[:, None]).exp()
            mass, squares = fall * mass + weights.sum(dim=-1), fall**2 * squares + weights.square().sum(dim=-1)
            top = higher
        norms[rows] = (1 - 2 * (taken - top).exp() / mass + squares / mass.square()).float()
    return norms
