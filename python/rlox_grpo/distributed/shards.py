"""Sharded tensors (torch DTensor): gather one, or shard one like another."""

from __future__ import annotations

from torch import Tensor


def gather_shards(tensor: Tensor) -> Tensor:
    """The full tensor: gathered from all ranks if it is sharded (a collective), else ``tensor`` itself."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def place_like(value: Tensor, like: Tensor) -> Tensor:
    """Move ``value`` to the device of ``like``, and shard it alike if ``like`` is sharded. No communication."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    value = value.to(like.device)
    if not isinstance(like, DTensor):
        return value
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
