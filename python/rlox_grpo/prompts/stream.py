"""Prompts from a stream of rows of unknown length, read in order. A resumed run skips the rows already used."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import Any

from rlox_grpo.prompts.files import read_table
from rlox_grpo.types import Prompt

PEEKED = 16
"""Number of rows that are checked before the run."""


def is_stream(prompts: Any) -> bool:
    """Whether ``prompts`` has no length: a ``datasets.IterableDataset``, a generator, or a function that makes one."""
    if hasattr(prompts, "__len__"):
        return False
    return hasattr(prompts, "__iter__") or callable(prompts)


def is_read_once(stream: Any) -> bool:
    """Whether a stream is an iterator, such as a generator: what it has yielded cannot be read again."""
    return hasattr(stream, "__iter__") and iter(stream) is stream


def read_stream(stream: Any) -> Iterator[Any]:
    """Yield the rows of a stream (see :func:`is_stream`) in order, and again from the start if that is possible.

    Before each pass over a ``datasets.IterableDataset``, ``set_epoch`` is called, so that it shuffles again. The first
    pass is epoch 0, also if another run has read the data set in this process.

    Raises:
        TypeError: the stream is a function that does not return an iterable.
    """
    epoch = 0
    while True:
        if hasattr(stream, "set_epoch"):
            stream.set_epoch(epoch)
        rows: Iterable[Any] = stream() if not hasattr(stream, "__iter__") else stream
        if not hasattr(rows, "__iter__"):
            raise TypeError(f"prompts is a function that returned {type(rows).__name__}: expected an iterator of rows")
        read = 0
        for row in read_table(rows):
            read += 1
            yield row
        if not read or (rows is stream and iter(rows) is rows):  # a generator, which can be read only once
            return
        epoch += 1


class StreamDraws:
    """Draw prompts from a stream in its own order.

    Attributes:
        first: The first prompts of the stream, up to :data:`PEEKED`.
        draws: Number of rows drawn; a resumed run continues there.
    """

    def __init__(
        self,
        stream: Any,
        load: Callable[[Sequence[Any]], Sequence[Prompt]],
        compare: Callable[[Sequence[Prompt]], None],
        label: Callable[[Prompt], Prompt] = lambda prompt: prompt,
    ) -> None:
        """Read and check the first rows.

        ``load`` converts a list of rows to prompts and checks them. ``compare`` checks prompts against each other; each
        row is compared with the first. ``label`` adds to a prompt everything that does not come from its row.

        Raises:
            ValueError: the stream is empty.
        """
        self._load, self._compare, self._label, rows = load, compare, label, read_stream(stream)
        peeked = list(islice(rows, PEEKED))
        if not peeked:
            raise ValueError("prompts is an empty stream: there is nothing to train on")
        self.first: list[Prompt] = []
        for index, row in enumerate(peeked):
            self.first.append(self._load_row(row, index))
        self._rows = chain(peeked, rows)
        self.draws = 0

    def skip_to(self, draws: int, wanted: Collection[int] = ()) -> dict[int, Prompt]:
        """Skip the rows before ``draws``, which the run has drawn before a resume.

        Returns:
            The prompts of the skipped rows in ``wanted``, by their number: batches that were drawn and not trained.

        Raises:
            ValueError: the stream has fewer rows, or a wanted row is invalid.
        """
        loaded: dict[int, Prompt] = {}
        while self.draws < draws:
            row = self._next_row()
            if (index := self.draws - 1) in wanted:
                loaded[index] = self._load_row(row, index)
        return loaded

    def take(self, count: int) -> list[Prompt]:
        """Return the next ``count`` prompts.

        The ``index`` of the prompts counts the rows of the stream over all passes.

        Raises:
            ValueError: the stream ends before that, or a row is invalid; the message names the row.
        """
        return [self._load_row(self._next_row(), self.draws - 1) for _ in range(count)]

    def _next_row(self) -> Any:
        try:
            row = next(self._rows)
        except StopIteration:
            raise ValueError(
                f"the stream of prompts ended after {self.draws} rows, and max_steps needs more: lower max_steps, or "
                "pass a stream that can be read again, such as a function that returns the generator"
            ) from None
        self.draws += 1
        return row

    def _load_row(self, row: Any, index: int) -> Prompt:
        try:
            (prompt,) = self._load([row])
            prompt = self._label(replace(prompt, index=index))
            self._compare([*self.first[:1], prompt])
        except (ValueError, TypeError, RuntimeError) as error:  # a RewardError is a RuntimeError
            error.args = (f"row {index} of the stream: {error}", *error.args[1:])
            raise
        return prompt
