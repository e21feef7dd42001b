"""Digests of Python values by content, the same in every process: what a resumed run compares of its rows.

An object counts by its class and by what ``pickle`` would save of it. Nothing is pickled or unpickled.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np
import torch

_PROTOCOL = 4
_PLAIN = (type(None), bool, int, float, complex, str)


def digest_content(value: Any) -> str:
    """Return a digest of a value: 32 hexadecimal digits.

    Equal content has equal digests, even of sets and dicts in another order. Functions, classes and modules count by
    their names. What cannot be pickled, such as an open file or a lock, counts by its class.
    """
    return _digest(value, ()).hex()[:32]


def is_json(value: Any) -> bool:
    """Whether ``json`` writes all of ``value``: text, numbers, None, lists, tuples, dicts with such keys."""
    if isinstance(value, dict):
        return all(key is None or isinstance(key, (str, int, float)) for key in value) and all(
            is_json(item) for item in value.values()
        )
    if isinstance(value, (list, tuple)):
        return all(is_json(item) for item in value)
    return value is None or isinstance(value, (str, int, float))


def _digest(value: Any, above: tuple[int, ...]) -> bytes:
    """Return the digest of ``value``; ``above`` are the identities of the objects that contain it."""
    if id(value) in above:
        return _join(b"cycle", str(len(above) - above.index(id(value))).encode())
    name = _name(type(value))
    if type(value) in _PLAIN:
        return _join(name, repr(value).encode("utf-8", "surrogatepass"))
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _join(name, bytes(value))
    if isinstance(value, torch.Tensor):
        return _digest_tensor(value)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return _join(name, str(value.dtype).encode(), str(value.shape).encode(), value.tobytes())
    is_function = inspect.isroutine(value) and not inspect.ismethod(value)  # a bound method counts with its object
    if inspect.isclass(value) or is_function or isinstance(value, ModuleType):
        return _join(name, _name(value))
    above = (*above, id(value))
    if isinstance(value, np.ndarray):
        return _join(name, str(value.shape).encode(), *(_digest(item, above) for item in value.ravel().tolist()))
    if type(value) in (list, tuple):
        return _join(name, *(_digest(item, above) for item in value))
    if isinstance(value, (set, frozenset)):  # the order of a set differs between processes
        return _join(name, *sorted(_digest(item, above) for item in value))
    if type(value) is dict:
        return _join(name, *_digest_items(value, above))
    return _join(name, *_digest_reduced(value, above))


def _digest_reduced(value: Any, above: tuple[int, ...]) -> list[bytes]:
    """Return the digests of what ``pickle`` would save of an object; none if the object cannot be pickled."""
    try:
        reduced = value.__reduce_ex__(_PROTOCOL)
        if isinstance(reduced, str):  # the name of a global object
            return [reduced.encode()]
        make, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
        digests = [_digest(make, above), _digest(arguments, above), _digest(state, above)]
        digests += [_digest(item, above) for item in items or ()]
        return digests + _digest_items(dict(pairs or ()), above)
    except Exception:  # noqa: BLE001  whatever a class of the user raises when it is pickled
        return []


def _digest_items(items: Mapping[Any, Any], above: tuple[int, ...]) -> list[bytes]:
    return sorted(_join(_digest(key, above), _digest(value, above)) for key, value in items.items())


def _digest_tensor(tensor: torch.Tensor) -> bytes:
    whole = tensor.detach()
    whole = (whole.to_dense() if whole.layout != torch.strided else whole).cpu().contiguous()
    content = whole.reshape(-1).resolve_conj().resolve_neg().view(torch.uint8).numpy().tobytes()
    return _join(b"torch.Tensor", str(tensor.dtype).encode(), str(tuple(tensor.shape)).encode(), content)


def _name(target: Any) -> bytes:
    module = getattr(target, "__module__", "")
    return f"{module}.{getattr(target, '__qualname__', getattr(target, '__name__', ''))}".encode()


def _join(*chunks: bytes) -> bytes:
    """Digest parts with their lengths, so that no two lists of parts are the same."""
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(len(chunk).to_bytes(8, "little"))
        digest.update(chunk)
    return digest.digest()
