"""Read the verdict at the end of a judge's reply. A verdict is one JSON object; anything else is no verdict."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

Values = TypeVar("Values")

_START = re.compile(r'\{\s*"(?:score|scores|winner)"\s*:')
_FENCED = re.compile(r"```(?:json)?\s*\Z", re.IGNORECASE)
_MOST_OBJECTS = 64
"""Verdicts in a reply that are compared with those of the completions; a reply with more has no verdict."""

_REFUSED = object()
"""Stands for what strict JSON does not have: NaN, infinities, an object with a key twice."""


class UnreadableReplyError(ValueError):
    """A reply without a verdict. The message says what is wrong with it."""


def read_verdict(reply: str, texts: Sequence[str], read: Callable[[Any], Values], longest: int) -> tuple[Any, Values]:
    """Return the verdict of a reply as its JSON value, and what ``read`` returns for it.

    The verdict is the only object of the judge's own at the end of the reply, after which only white space or the end
    of its code block may come. Reasoning up to ``</think>`` is not read. An object that is also in one of the texts
    that the judge has read is a quotation: it is not a second verdict, and as the last object it is not the verdict.

    Args:
        reply: the judge's reply.
        texts: what the judge has read: prompts, completions, columns.
        read: returns the values of the object, or raises :class:`UnreadableReplyError`.
        longest: the largest number of characters of a verdict.

    Raises:
        UnreadableReplyError: there is no such object.
    """
    reply = reply.rpartition("</think>")[2].rstrip()
    stripped = reply.removesuffix("```").rstrip()
    starts = [match.start() for match in _START.finditer(stripped)]
    if not starts:
        raise UnreadableReplyError("it has no verdict" if reply else "it is empty")
    objects = list(_list_objects(stripped, starts, longest))
    if not objects or objects[-1][1] != len(stripped):
        raise UnreadableReplyError("its verdict is not the last thing in it, or not JSON")
    start, _, verdict = objects[-1]
    if len(stripped) < len(reply) and not _FENCED.search(stripped[:start]):
        raise UnreadableReplyError("its verdict is not the last thing in it")
    if len(objects) > _MOST_OBJECTS:
        raise UnreadableReplyError(f"it has {len(objects)} verdicts")
    values = read(verdict)
    quoted = [quotation for text in texts for quotation in _list_quotations(text, longest)]
    if verdict in quoted:
        raise UnreadableReplyError("its verdict is also in a text that it judges")
    if any(earlier not in quoted for _, _, earlier in objects[:-1]):
        raise UnreadableReplyError("it has several verdicts")
    return verdict, values


def check_score(value: Any) -> float:
    """Return a score as a float.

    Raises:
        UnreadableReplyError: it is not a number from 0 to 1; a boolean or a text is not one.
    """
    if type(value) not in (int, float) or not 0 <= value <= 1:  # false for NaN
        raise UnreadableReplyError(f"a score is {_shorten(value)}, expected a number from 0 to 1")
    return float(value)


def take_value(verdict: Any, key: str) -> Any:
    """Return the value of a verdict that has ``key`` and no other key.

    Raises:
        UnreadableReplyError: it has other keys.
    """
    if not isinstance(verdict, dict) or verdict.keys() != {key}:
        raise UnreadableReplyError(f"its verdict is {_shorten(verdict)}, expected an object with {key!r} alone")
    return verdict[key]


def has_verdict(text: str, longest: int) -> bool:
    """Whether a text states a JSON object that could be a verdict."""
    return next(iter(_list_quotations(text, longest)), None) is not None


def _list_quotations(text: str, longest: int) -> Iterator[Any]:
    starts = [match.start() for match in _START.finditer(text)]
    return (verdict for _, _, verdict in _list_objects(text, starts, longest))


def _list_objects(text: str, starts: Sequence[int], longest: int) -> Iterator[tuple[int, int, Any]]:
    """Yield the start, the end and the value of each JSON object of at most ``longest`` characters, none in another."""
    decoder = json.JSONDecoder(
        object_pairs_hook=lambda pairs: dict(pairs) if len(dict(pairs)) == len(pairs) else _REFUSED,
        parse_constant=lambda _: _REFUSED,
    )
    last = 0
    for start in starts:
        if start < last:
            continue
        try:
            verdict, length = decoder.raw_decode(text[start : start + longest])
        except (ValueError, RecursionError):  # not JSON, or not closed
            continue
        last = start + length
        yield start, last, verdict


def _shorten(value: Any) -> str:
    text = "not strict JSON" if value is _REFUSED else repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
