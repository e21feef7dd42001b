"""Write and read a safetensors file of weights one tensor at a time, without a second copy of the weights in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
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

    The header precedes the data but is known only after it, so space is reserved for it.

    Args:
        weights: iterated exactly once and to the end, also on an error, because gathering shards is a collective.
        expected: names and shapes of the engine's model.
        path: the file; it is not left behind if this raises.

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
        path: the file; ``ray:PATH`` is a file of rank 0's node, which is read through Ray's object store.
        expected: names and shapes of the engine's model.

    Raises:
        OSError, safetensors.SafetensorError: the file is missing, or is not a complete safetensors file.
        WeightMismatchError: names, shapes or types are not those of ``expected``.
    """
    from safetensors import safe_open

    with _RemoteWeights(path) if path.startswith(SCHEME) else safe_open(path, framework="pt") as file:
        check = WeightCheck(expected)
        names = list(file.keys())
        for name in names:
            part = file.get_slice(name)
            check.add_shape(name, tuple(part.get_shape()), _BY_NAME.get(part.get_dtype(), torch.uint8))
        check.finish()
        yield ((name, file.get_tensor(name)) for name in names)


class _RemoteWeights:
    """A remote file of :func:`write_weights`, with the methods of ``safe_open`` that :func:`opened_weights` calls."""

    def __init__(self, path: str) -> None:
        self._file = RemoteFile(path)
        length = int.from_bytes(self._file.read(0, _LENGTH_BYTES).tobytes(), "little")
        self._entries = json.loads(self._file.read(_LENGTH_BYTES, length).tobytes())
        self._data = _LENGTH_BYTES + length

    def __enter__(self) -> _RemoteWeights:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def keys(self) -> list[str]:
        return [*self._entries]

    def get_slice(self, name: str) -> _Slice:
        return _Slice(self._entries[name])

    def get_tensor(self, name: str) -> Tensor:
        entry = self._entries[name]
        start, end = entry["data_offsets"]
        if start == end:  # torch cannot view an empty byte tensor as another dtype
            return torch.empty(entry["shape"], dtype=_BY_NAME[entry["dtype"]])
        data = torch.from_numpy(self._file.read(self._data + start, end - start))
        return data.view(_BY_NAME[entry["dtype"]]).reshape(entry["shape"])


@dataclass(frozen=True)
class _Slice:
    entry: Mapping[str, Any]

    def get_shape(self) -> list[int]:
        return list(self.entry["shape"])

    def get_dtype(self) -> str:
        return str(self.entry["dtype"])


def _make_header(entries: Mapping[str, tuple[str, tuple[int, ...], int, int]]) -> bytes:
    """The header of a safetensors file, padded to a multiple of 8 bytes, which aligns the tensors after it."""
    told: dict[str, Any] = {
        name: {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
        for name, (dtype, shape, start, end) in entries.items()
    }
    header = json.dumps(told).encode()
    return header.ljust(-(-len(header) // _LENGTH_BYTES) * _LENGTH_BYTES)
