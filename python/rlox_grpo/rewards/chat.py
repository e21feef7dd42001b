"""Completions of chat prompts, as reward functions receive them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

HINT = "the prompts are chat messages, so each completion is a list of messages: the text is [0]['content']"
"""Added to the error of a function that got chat messages and may expect text."""

_TEXT_HINT = (
    "the prompts are text, so each completion is a text too: leave out [0]['content'], or give prompts as chat messages"
)


def hint_at_kind(completion: Any, error: Exception) -> str:
    """Return ``; `` and what a completion is, for the error of a function that may expect the other kind, else nothing.

    Args:
        completion: as the function got it.
        error: what the function raised.
    """
    if isinstance(completion, list):
        return f"; {HINT}"
    takes_messages = any(text in str(error) for text in ("string ind", "'str' object has no attribute"))
    return f"; {_TEXT_HINT}" if isinstance(completion, str) and takes_messages else ""


class ChatCompletion(list[Mapping[str, Any]]):
    """A completion of a chat prompt: a list of messages that raises TypeError when it is compared with text.

    ``"x" in completion``, ``completion.count("x")`` and ``completion == "x"`` of a plain list are False or 0 for every
    completion, so that a function written for text would score all of them alike without an error. ``len`` is the
    number of messages, which a function may ask for: see :func:`took_lengths_alone`.

    Attributes:
        counted: Whether ``len`` was called.
        read: Whether a message was read, by its place or by iterating.
    """

    counted = False
    read = False

    def __len__(self) -> int:
        """Number of messages."""
        self.counted = True
        return super().__len__()

    def __getitem__(self, place: Any, /) -> Any:
        """A message, or a list of them."""
        self.read = True
        return super().__getitem__(place)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        """The messages."""
        self.read = True
        return super().__iter__()

    def __contains__(self, item: object) -> bool:
        """Whether this message is among them."""
        return super().__contains__(_refuse_text(item, "in"))

    def __eq__(self, other: object) -> bool:
        """Whether these are the same messages."""
        return super().__eq__(_refuse_text(other, "=="))

    def __ne__(self, other: object) -> bool:
        """Whether these are other messages."""
        return super().__ne__(_refuse_text(other, "!="))

    def count(self, value: Any, /) -> int:
        """How often this message is among them."""
        return super().count(_refuse_text(value, "count"))

    def index(self, value: Any, /, *bounds: Any) -> int:
        """The first place of this message."""
        return super().index(_refuse_text(value, "index"), *bounds)


def forget_reading(completions: Sequence[Any]) -> None:
    """Forget what was read of chat completions, before another function gets them."""
    for completion in completions:
        if isinstance(completion, ChatCompletion):
            completion.counted = completion.read = False


def took_lengths_alone(completions: Sequence[Any]) -> bool:
    """Whether a function asked for the ``len`` of each chat completion and read none of their messages.

    A function written for text that scores by length does so: its scores are then those of the number of messages.
    """
    return bool(completions) and all(
        isinstance(completion, ChatCompletion) and completion.counted and not completion.read
        for completion in completions
    )


def _refuse_text(other: Any, operation: str) -> Any:
    """Return ``other``; raise TypeError if it is text, which no message equals."""
    if isinstance(other, str):
        raise TypeError(f"{operation} looks for the text {other[:40]!r} among messages")
    return other
