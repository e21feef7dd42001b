"""Tensors whose parts lie on several ranks (torch DTensor): gather one, or place one like another."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def whole(tensor: Tensor) -> Tensor:
    """``tensor`` itself, or all of it gathered where it lies in shards: then a collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def placed_like(value: Tensor, like: Tensor) -> Tensor:
    """``value`` on the device of ``like``; this rank's part of it where that lies in shards. No communication."""
    value = value.to(like.device)
    if not isinstance(like, DTensor):
        return value
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
