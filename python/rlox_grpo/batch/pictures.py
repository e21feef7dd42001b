"""The tokens of pictures in a row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlox_grpo.types import BoolArray, Int64Array, Picture


def mark_pictures(token_ids: Int64Array, pictures: Sequence[Picture]) -> BoolArray:
    """Return ``bool [L]``, True on the ids that stand for ``pictures``, with the marks around them.

    Raises:
        ValueError: the ids of a picture do not follow those of the picture before it.
    """
    marks, start = np.zeros(len(token_ids), np.bool_), 0
    text, size = np.ascontiguousarray(token_ids, np.int64).tobytes(), 8
    for index, picture in enumerate(pictures):
        wanted = np.ascontiguousarray(picture.token_ids, np.int64).tobytes()
        offset = text.find(wanted, start * size)
        while offset >= 0 and offset % size:  # bytes of two neighbouring ids
            offset = text.find(wanted, offset + 1)
        if offset < 0:
            raise ValueError(f"the ids of picture {index} are not in its row after those of the pictures before it")
        start = offset // size + len(picture.token_ids)
        marks[offset // size : start] = True
    return marks
