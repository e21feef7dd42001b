"""Prompts from a stream of rows whose number is not known: read in order, and skipped exactly on a resume."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from rlox_grpo.types import Prompt

PEEKED = 16
"""Rows that are read and checked before anything is sampled."""


def is_stream(prompts: Any) -> bool:
    """Whether ``prompts`` has no length: a ``datasets.IterableDataset``, a generator, or a function that makes one."""
    if hasattr(prompts, "__len__"):
        return False
    return hasattr(prompts, "__iter__") or callable(prompts)


def read_rows_of(stream: Any) -> Iterator[Any]:
    """Yield the rows in order. A stream that can be read again starts anew at its end.

    Of a ``datasets.IterableDataset`` each pass is an epoch of its own (``set_epoch``), so that it shuffles anew.

    Args:
        stream: see :func:`is_stream`.

    Raises:
        TypeError: a function that returns something else than an iterable.
    """
    epoch = 0
    while True:
        if epoch and hasattr(stream, "set_epoch"):
            stream.set_epoch(epoch)
        rows: Iterable[Any] = stream() if not hasattr(stream, "__iter__") else stream
        if not hasattr(rows, "__iter__"):
            raise TypeError(f"prompts is a function that returned {type(rows).__name__}: expected an iterator of rows")
        read = 0
        for row in rows:
            read += 1
            yield row
        if not read or (rows is stream and iter(rows) is rows):  # used up: it cannot be read again
            return
        epoch += 1


class StreamDraws:
    """Draw prompts from a stream in its own order.

    Attributes:
        first: The stream's first prompts, up to :data:`PEEKED`.
        draws: Rows drawn so far; a resumed run continues there.
    """

    def __init__(self, stream: Any, load: Callable[[Sequence[Any]], Sequence[Prompt]]) -> None:
        """Read and check the first rows.

        Args:
            stream: see :func:`is_stream`.
            load: makes prompts of a list of rows, and checks them.

        Raises:
            ValueError: an empty stream.
        """
        self._load, self._rows = load, read_rows_of(stream)
        self._peeked = list(islice(self._rows, PEEKED))
        if not self._peeked:
            raise ValueError("prompts is an empty stream: there is nothing to train on")
        self.first = [self._load_row(row, index) for index, row in enumerate(self._peeked)]
        self._peeked.reverse()
        self.draws = 0

    def skip_to(self, draws: int) -> None:
        """Leave out the rows before ``draws``, which an earlier start has drawn.

        Raises:
            ValueError: the stream ends before.
        """
        while self.draws < draws:
            self._next_row()

    def take(self, count: int) -> list[Prompt]:
        """The next ``count`` prompts; ``index`` is the row's place in the stream, over all passes.

        Raises:
            ValueError: the stream ends before, or a row cannot be used; names the row.
        """
        return [self._load_row(self._next_row(), self.draws - 1) for _ in range(count)]

    def _next_row(self) -> Any:
        try:
            row = self._peeked.pop() if self._peeked else next(self._rows)
        except StopIteration:
            raise ValueError(
                f"the stream of prompts ended after {self.draws} rows, and max_steps needs more: lower max_steps, or "
                "pass what can be read again, such as a function that returns the generator"
            ) from None
        self.draws += 1
        return row

    def _load_row(self, row: Any, index: int) -> Prompt:
        try:
            (prompt,) = self._load([row])
        except (ValueError, TypeError, RuntimeError) as error:  # a RewardError is a RuntimeError
            error.args = (f"row {index} of the stream: {error}", *error.args[1:])
            raise
        return replace(prompt, index=index)
