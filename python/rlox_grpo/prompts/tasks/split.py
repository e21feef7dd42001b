"""Split rows into training and held-out rows by a key."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import TypeVar

Row = TypeVar("Row")


def split_by_key(
    rows: Iterable[Row], key: Callable[[Row], object], *, held_out: float, seed: int
) -> tuple[list[Row], list[Row]]:
    """Split rows into training and held-out rows. Rows with the same key are in the same part.

    The part depends only on ``seed`` and the key, so it is the same in calls with other rows. ``held_out`` is the
    expected share of held-out rows, not an exact one.

    Raises:
        ValueError: ``held_out`` is not in [0, 1].
    """
    if not 0.0 <= held_out <= 1.0:
        raise ValueError(f"held_out is {held_out}, expected 0 to 1")
    train: list[Row] = []
    held: list[Row] = []
    for row in rows:
        digest = hashlib.blake2b(f"{seed}:{key(row)}".encode(), digest_size=8).digest()
        (held if int.from_bytes(digest, "big") / 2**64 < held_out else train).append(row)
    return train, held
