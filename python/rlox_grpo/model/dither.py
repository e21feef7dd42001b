"""Dither weights: begin with float32 weights anywhere within the rounding of their bfloat16 values."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlox_grpo.model.precision import find_linear_parameters

_CHUNK = 2**20
"""Numbers of a weight that one generator draws."""

_HALF_SPACING = 2**15
"""float32 numbers between a bfloat16 number and the midpoint to the next one."""


@torch.no_grad()
def dither_weights(model: nn.Module, *, everything: bool = False) -> int:
    """Draw the trained weights of linear layers from the float32 numbers that round to their bfloat16 values, in place.

    Products in bfloat16 round their weights, so the function of the model stays equal to the bit. Without dither, the
    weights of a checkpoint in bfloat16 lie on the grid of bfloat16 themselves, and no product sees an update before it
    is half a spacing (0.2 to 0.4 % of a weight). With it, a weight reaches the next number of the grid with a
    probability in proportion to its update, so that on average the products see each update.

    Embeddings, norms, and an output layer, whose products may be in float32, are unchanged. So are weights that do not
    lie on the grid, because they can be anywhere within their rounding already.

    The draws of a weight depend on its name alone, so that a resumed run, and a run with another seed, begin with the
    same weights.

    Args:
        model: with float32 weights.
        everything: draw weights off the grid too: dequantized ones are multiples of another grid.

    Returns:
        The number of weights in the layers that are dithered.
    """
    dither, chosen = make_dither(model, everything=everything)
    count = 0
    for name, weight in model.named_parameters():
        if name in chosen:
            flat = weight.reshape(-1)  # a copy, if the weight is not contiguous
            dither(flat, name, 0)
            weight.copy_(flat.view_as(weight))
            count += weight.numel()
    return count


def make_dither(model: nn.Module, *, everything: bool = False) -> tuple[Callable[[Tensor, str, int], None], set[str]]:
    """Return a function that dithers a part of a weight (:func:`draw_weights`), and the names of weights to dither.

    The function leaves weights of other names unchanged. The model may be blank.
    """
    chosen = _list_dithered(model)

    def dither(flat: Tensor, name: str, start: int) -> None:
        if name in chosen:
            draw_weights(flat, name, start, everything=everything)

    return dither, chosen


def are_bfloat16_numbers(model: nn.Module) -> bool:
    """Whether ``dither_weights="auto"`` draws the weights of ``model``: their first numbers all lie on the grid."""
    names = _list_dithered(model)
    starts = [weight.detach().reshape(-1)[:_CHUNK] for name, weight in model.named_parameters() if name in names]
    return bool(starts) and all(torch.equal(start, start.bfloat16().float()) for start in starts)


def _list_dithered(model: nn.Module) -> set[str]:
    """Return the names of the weights that :func:`dither_weights` draws."""
    find_head: Any = getattr(model, "get_output_embeddings", lambda: None)
    chosen = find_linear_parameters(model) - {id(getattr(find_head(), "weight", None))}
    return {
        name
        for name, weight in model.named_parameters()
        # Not a bias, which has one dimension.
        if id(weight) in chosen and weight.dim() == 2 and weight.requires_grad and weight.dtype == torch.float32
    }


def draw_weights(flat: Tensor, name: str, start: int, *, everything: bool = False) -> None:
    """Dither a part of one weight in place.

    Each part of a weight gets the numbers that it has in the whole weight, so that a rank can read its shard alone.

    Args:
        flat: ``float32 [N]``, the numbers ``start`` to ``start + N`` of the flat weight.
        name: the weight's name.
        start: where the part begins.
        everything: see :func:`dither_weights`.
    """
    stop = start + len(flat)
    for chunk in range(start // _CHUNK, -(-stop // _CHUNK)):
        first = chunk * _CHUNK
        low, high = max(start, first), min(stop, first + _CHUNK)
        numbers = flat[low - start : high - start]
        rounded = numbers.bfloat16().float()
        if everything or torch.equal(numbers, rounded):
            # The draws of a chunk begin with its first number, wherever the part begins.
            steps = _draw_steps(f"{name}:{chunk}", high - first)[low - first :]
            numbers.copy_(_move(rounded, steps.to(flat.device)))


def _draw_steps(key: str, count: int) -> Tensor:
    """Return ``int32 [count]``, uniform within the rounding of a bfloat16 number; a longer draw begins with these."""
    bits = np.random.SFC64(zlib.crc32(key.encode())).random_raw(-(-count // 4))
    steps = torch.from_numpy(bits.view(np.int16)[:count]).to(torch.int32)
    return steps.clamp_(min=1 - _HALF_SPACING)


def _move(rounded: Tensor, steps: Tensor) -> Tensor:
    """Return the float32 numbers ``int32 [N]`` steps from bfloat16 numbers, which are ``float32 [N]``.

    The bits of a float32 number, as an integer, count its place among all float32 numbers.
    """
    moved = (rounded.view(torch.int32) + steps).view(torch.float32)
    # Below 0 there is no bit pattern to go to.
    return torch.where((rounded == 0) | ~torch.isfinite(rounded), rounded, moved)
