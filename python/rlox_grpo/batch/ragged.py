"""Rows of different lengths as flat int64 values and offsets, whatever form they come in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import rlox_grpo._native as _native
from rlox_grpo.types import Int64Array


def as_ragged(rows: Any, offsets: Any, name: str) -> tuple[Int64Array, Int64Array]:
    """Return flat ``values`` and ``offsets``; row i is ``values[offsets[i]:offsets[i + 1]]``.

    Args:
        rows: Lists of ints, 1-D integer arrays, one 2-D integer array, or with ``offsets`` one flat array.
        offsets: ``int64 [N + 1]`` into a flat ``rows``, or None.
        name: Name of ``rows`` in errors.

    Raises:
        TypeError: Values that are not integers; the message names the row.
        ValueError: An integer beyond 64 bits; the message names the row and the place.
    """
    if offsets is not None:
        return to_integers(rows, name, 1), to_integers(offsets, "offsets", 1)
    if isinstance(rows, (list, tuple)):
        if all(type(row) is list for row in rows):
            return _native.flatten_rows(rows if type(rows) is list else list(rows), name)
        return concatenate(rows, np.int64, name)
    values = to_integers(rows, name, 2)
    return values.reshape(-1), np.arange(len(values) + 1, dtype=np.int64) * values.shape[1]


def concatenate(rows: Sequence[Any], dtype: type[np.generic], name: str) -> tuple[NDArray[Any], Int64Array]:
    """Return the joined arrays, and where each begins; all are one-dimensional and of the kind ``dtype``."""
    kind = np.dtype(dtype).kind
    arrays = [np.asarray(row) for row in rows]
    for index, array in enumerate(arrays):
        if array.ndim != 1 or (array.dtype.kind != kind and array.size):
            raise TypeError(
                f"{name}[{index}] has dtype {array.dtype} and shape {array.shape}: "
                f"expected {np.dtype(dtype)} in one dimension"
            )
    values = np.concatenate(arrays, dtype=dtype, casting="unsafe") if arrays else np.empty(0, dtype)
    offsets = np.zeros(len(arrays) + 1, dtype=np.int64)
    np.cumsum(np.fromiter(map(len, arrays), np.int64, len(arrays)), out=offsets[1:])
    return values, offsets


def to_integers(values: Any, name: str, ndim: int) -> Int64Array:
    """Return ``values`` as a contiguous int64 array of ``ndim`` dimensions, without a copy if it is one already."""
    array = np.asarray(values)
    if array.ndim != ndim or not (array.dtype.kind == "i" or array.size == 0):
        raise TypeError(
            f"{name} has dtype {array.dtype} and shape {array.shape}: expected int64 of {ndim} dimension(s)"
        )
    if array.dtype == np.int64 and array.flags.c_contiguous and array.flags.aligned:
        return array
    return np.array(array, dtype=np.int64, order="C")


def check_at_least(value: int, least: int, name: str) -> int:
    """Return ``value``; raise ValueError if it is below ``least``."""
    if value < least:
        raise ValueError(f"{name} is {value}: at least {least}")
    return value
