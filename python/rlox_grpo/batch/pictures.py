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
    marks, end = np.zeros(len(token_ids), np.bool_), 0
    for index, picture in enumerate(pictures):
        start = picture.find_in(token_ids, end)
        if start is None:
            raise ValueError(f"the ids of picture {index} are not in its row after those of the pictures before it")
        end = start + len(picture.token_ids)
        marks[start:end] = True
    return marks
