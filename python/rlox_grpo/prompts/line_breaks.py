r"""The line breaks that a processor writes around a picture, as Gemma 3's does.

A tokenizer may have a token for several line breaks, so those of a picture are encoded together with those of the text
beside it, as in the text that the processor writes::

    template    user\n<start_of_image>a              the text before the picture ends with one line break
    processor   user\n\n\n<start_of_image>…<end_of_image>\n\na       and has three, one token, with the picture's
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlox_grpo.types import Int64Array

_MOST = 64
"""Longest token of line breaks that is looked for; Gemma 3 has tokens of up to 31."""


class LineBreaks:
    """Adds the line breaks of pictures to the token ids of the text between them.

    Attributes:
        are_written: whether the processor writes any.
    """

    def __init__(self, tokenizer: Any, sequence: Any) -> None:
        """Prepare for a processor that writes the text ``sequence`` for a picture; other processors have none."""
        self._tokenizer = tokenizer
        text = sequence if isinstance(sequence, str) else ""
        self._before, self._after = len(text) - len(text.lstrip("\n")), len(text) - len(text.rstrip("\n"))
        self.are_written = bool(self._before or self._after)
        self._lengths: dict[int, int] = {}  # line breaks of each token that is only line breaks
        for length in range(1, _MOST + 1) if self.are_written else ():
            ids = tokenizer("\n" * length, add_special_tokens=False)["input_ids"]
            if len(ids) == 1:
                self._lengths[int(ids[0])] = length

    def strip(self, token_ids: Int64Array) -> Int64Array:
        """Return the ids of a picture alone without the line breaks around it."""
        start, stop = self._find_edges(token_ids)
        return token_ids[start:stop]

    def add(self, pieces: Sequence[Int64Array]) -> list[Int64Array]:
        """Return the ids of the text before, between and after pictures, with the line breaks of the pictures."""
        return self._change(pieces, 1)

    def remove(self, pieces: Sequence[Int64Array]) -> list[Int64Array]:
        """Return the ids without the line breaks of the pictures: the inverse of :meth:`add`."""
        return self._change(pieces, -1)

    def _change(self, pieces: Sequence[Int64Array], sign: int) -> list[Int64Array]:
        if not self.are_written or len(pieces) == 1:
            return list(pieces)
        last = len(pieces) - 1
        return [
            self._resize(piece, sign * self._after * (index > 0), sign * self._before * (index < last))
            for index, piece in enumerate(pieces)
        ]

    def _resize(self, piece: Int64Array, leading: int, trailing: int) -> Int64Array:
        """Return the ids of a text with more line breaks, or fewer if negative, at its beginning and its end."""
        start, stop = self._find_edges(piece)
        if start == stop:  # only line breaks
            return self._encode(self._count(piece) + leading + trailing)
        head = self._encode(self._count(piece[:start]) + leading) if leading else piece[:start]
        tail = self._encode(self._count(piece[stop:]) + trailing) if trailing else piece[stop:]
        return np.concatenate([head, piece[start:stop], tail])

    def _find_edges(self, token_ids: Int64Array) -> tuple[int, int]:
        """Return the range of the ids without the line breaks at the beginning and at the end."""
        others = [index for index, token in enumerate(token_ids.tolist()) if token not in self._lengths]
        return (others[0], others[-1] + 1) if others else (0, 0)

    def _count(self, token_ids: Int64Array) -> int:
        return sum(self._lengths[token] for token in token_ids.tolist())

    def _encode(self, count: int) -> Int64Array:
        ids = self._tokenizer("\n" * max(0, count), add_special_tokens=False)["input_ids"]
        return np.array(ids, np.int64)
