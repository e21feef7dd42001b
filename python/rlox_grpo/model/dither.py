"""Dither weights: begin with float32 weights anywhere within the rounding of their bfloat16 values."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor, nn

from rlox_grpo.model.precision import find_linear_parameters

_CHUNK = 2**24
"""Most numbers that are drawn at once."""


@torch.no_grad()
def dither_weights(model: nn.Module, seed: int) -> int:
    """Draw the trained weights of linear layers from the float32 numbers that round to their bfloat16 values, in place.

    Products in bfloat16 round their weights, so the function of the model stays equal to the bit. Without dither, the
    weights of a checkpoint in bfloat16 lie on the grid of bfloat16 themselves, and no product sees an update before it
    is half a spacing (0.2 to 0.4 % of a weight). With it, a weight reaches the next number of the grid with a
    probability in proportion to its update, so that on average the products see each update.

    Embeddings, norms, and an output layer, whose products may be in float32, are unchanged.

    Args:
        model: with float32 weights.
        seed: the draws of a weight depend on it and on the name of the weight.

    Returns:
        The number of weights that were drawn.
    """
    find_head: Any = getattr(model, "get_output_embeddings", lambda: None)
    head = find_head()
    chosen = find_linear_parameters(model) - {id(getattr(head, "weight", None))}
    count = 0
    for name, weight in model.named_parameters():
        is_matrix = weight.dim() == 2  # not a bias
        if id(weight) in chosen and is_matrix and weight.requires_grad and weight.dtype == torch.float32:
            generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
            for chunk in torch.split(weight.view(-1), _CHUNK):
                chunk.copy_(_draw(chunk, generator))
            count += weight.numel()
    return count


def _draw(weights: Tensor, generator: torch.Generator) -> Tensor:
    """Return a float32 number that rounds to the same bfloat16 number, for each of ``float32 [N]``."""
    rounded = weights.bfloat16().float()
    spacing = torch.ldexp(torch.ones_like(rounded), torch.frexp(rounded)[1] - 8)  # bfloat16 has 8 bits of precision
    share = torch.rand(len(weights), generator=generator).to(weights.device) - 0.5
    drawn = rounded + share * spacing
    # Below a power of two the spacing is half as wide, and at the ends of the range there is none.
    return torch.where(drawn.bfloat16().float() == rounded, drawn, rounded)
