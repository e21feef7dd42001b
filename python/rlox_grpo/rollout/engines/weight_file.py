"""Write and read a safetensors file of weights one tensor at a time, without a second copy of the weights in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from rlox_grpo.distributed.ray_cluster.remote_file import SCHEME, RemoteFile
from rlox_grpo.rollout.engines.weight_sync import Manifest, WeightCheck, WeightDigest

_DTYPES: Mapping[torch.dtype, str] = MappingProxyType(
    {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
)
_BY_NAME = {name: dtype for dtype, name in _DTYPES.items()}
_LENGTH_BYTES = 8


def write_weights(weights: Iterable[tuple[str, Tensor]], expected: Manifest, path: Path) -> str:
    """Check and write weights in one pass; returns their digest.

    The header precedes the data but is known only after them, so space is reserved for the header.

    Args:
        weights: iterated exactly once and to the end, even after an error, because gathering shards is a collective.
        expected: names and shapes of the engine's model.
        path: the file; it is removed if this raises.

    Raises:
        WeightMismatchError: names, shapes or types are not those of ``expected``.
        OSError: the file cannot be written.
    """
    room = len(_make_header({name: ("BF16", shape, 2**50, 2**50) for name, shape in expected.items()}))
    check, digest = WeightCheck(expected), WeightDigest()
    entries: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
    rest = iter(weights)
    unfinished = path.with_suffix(".part")
    try:
        with unfinished.open("wb") as file:
            file.seek(_LENGTH_BYTES + room)
            start = 0
            for name, tensor in rest:
                check.add(name, tensor)
                if tensor.is_meta or tensor.dtype not in _DTYPES or name not in expected:
                    continue  # the check fails
                digest.add(name, tensor)
                data = tensor.detach().contiguous().flatten().view(torch.uint8).cpu().numpy()
                file.write(data.data)
                entries[name] = (_DTYPES[tensor.dtype], tuple(tensor.shape), start, start + data.size)
                start += data.size
            check.finish()
            file.seek(0)
            file.write(room.to_bytes(_LENGTH_BYTES, "little") + _make_header(entries).ljust(room))
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
        for _ in rest:
            pass
    return digest.finish()


@contextmanager
def opened_weights(path: str, expected: Manifest) -> Iterator[Iterator[tuple[str, Tensor]]]:
    """Open a file, check its names, shapes and types, and yield an iterator that reads one tensor at a time.

    Args:
        path: the file; ``ray:PATH`` is a file on the node of rank 0, which is read through Ray's object store.
        expected: names and shapes of the engine's model.

    Raises:
        OSError, safetensors.SafetensorError: the file is missing, or is not a complete safetensors file.
        WeightMismatchError: names, shapes or types are not those of ``expected``.
    """
    with _opened(path) as (entries, read):
        check = WeightCheck(expected)
        for name, (shape, dtype) in entries.items():
            check.add_shape(name, tuple(shape), _BY_NAME.get(dtype, torch.uint8))
        check.finish()
        yield ((name, read(name)) for name in entries)


@contextmanager
def _opened(path: str) -> Iterator[tuple[dict[str, tuple[list[int], str]], Callable[[str], Tensor]]]:
    """Open a file.

    Yield the shape and the dtype, by safetensors' name, of each tensor, and a function that reads a tensor.
    """
    from safetensors import safe_open

    if path.startswith(SCHEME):
        yield _open_remote(RemoteFile(path))
        return
    with safe_open(path, framework="pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  it is no mapping
        yield (
            {name: (tensor_slice.get_shape(), tensor_slice.get_dtype()) for name, tensor_slice in slices.items()},
            file.get_tensor,
        )


def _open_remote(file: RemoteFile) -> tuple[dict[str, tuple[list[int], str]], Callable[[str], Tensor]]:
    """Open a remote file of :func:`write_weights`."""
    length = int.from_bytes(file.read(0, _LENGTH_BYTES).tobytes(), "little")
    entries = json.loads(file.read(_LENGTH_BYTES, length).tobytes())

    def read(name: str) -> Tensor:
        entry = entries[name]
        start, end = entry["data_offsets"]
        if start == end:  # torch cannot view an empty byte tensor as another dtype
            return torch.empty(entry["shape"], dtype=_BY_NAME[entry["dtype"]])
        data = torch.from_numpy(file.read(_LENGTH_BYTES + length + start, end - start))
        return data.view(_BY_NAME[entry["dtype"]]).reshape(entry["shape"])

    return {name: (entry["shape"], entry["dtype"]) for name, entry in entries.items()}, read


def _make_header(entries: Mapping[str, tuple[str, tuple[int, ...], int, int]]) -> bytes:
    """Return the header of a safetensors file, padded to a multiple of 8 bytes, which aligns the tensors after it."""
    header_entries: dict[str, Any] = {
        name: {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
        for name, (dtype, shape, start, end) in entries.items()
    }
    header = json.dumps(header_entries).encode()
    return header.ljust(-(-len(header) // _LENGTH_BYTES) * _LENGTH_BYTES)
