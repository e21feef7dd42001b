"""Sharded tensors (torch DTensor, or DeepSpeed's ZeRO 3): gather one, shard one like another, find its whole shape."""

from __future__ import annotations

from torch import Tensor


def gather_shards(tensor: Tensor) -> Tensor:
    """Return the full tensor: gathered from all ranks if it is sharded (a collective), else ``tensor`` itself."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(value: Tensor, like: Tensor) -> Tensor:
    """Move ``value`` to the device of ``like``, and shard it in the same way if ``like`` is sharded.

    No communication.
    """
    from torch.distributed.tensor import DTensor, distribute_tensor

    value = value.to(like.device)
    if not isinstance(like, DTensor):
        return value
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def find_whole_shape(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of the full tensor. ZeRO 3 leaves no elements in a partitioned parameter."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def local_shard(tensor: Tensor) -> Tensor:
    """Return the rows of ``tensor`` that this rank holds, as they lie in memory; all of them if it is not sharded."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def find_local_rows(tensor: Tensor) -> slice:
    """The rows of a whole ``tensor`` that this rank holds. FSDP2 gives each rank ``ceil(rows / ranks)``, in order.

    Raises:
        RuntimeError: a tensor that is divided in another way.
    """
    from torch.distributed.tensor import DTensor, Shard

    if not isinstance(tensor, DTensor):
        return slice(0, tensor.shape[0])
    mesh, rows = tensor.device_mesh, tensor.shape[0]
    step = -(-rows // mesh.size())
    start = min(rows, mesh.get_local_rank() * step)
    local_rows = slice(start, min(rows, start + step))
    if tuple(tensor.placements) != (Shard(0),) or tensor.to_local().shape[0] != local_rows.stop - local_rows.start:
        raise RuntimeError(f"rows are not divided as FSDP2 divides them: {tensor.placements}")
    return local_rows
