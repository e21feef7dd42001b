"""Read the verdict at the end of a judge's reply. A verdict is one JSON object; anything else is no verdict."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from rlox_grpo.rewards.judge.questions import INVISIBLE

Values = TypeVar("Values")

_START = re.compile(r'\{\s*"(?:score|scores|winner|mark)"\s*:')
_STATED = re.compile(
    r"(?:[{\uff5b\ufe5b]|\\u007b|\\x7b|&#123;|&#x7b;|&lbrace;|&lcub;).{0,40}?(?:score|winner|mark|\\u00)",
    re.IGNORECASE | re.DOTALL,
)
"""What a judge could write as a verdict when it quotes a text: with other quotation marks, escapes or wide letters."""

_FILLING = re.compile(rf"(?:\s|{INVISIBLE})+")
"""What a judge may leave out when it quotes a text, however long it is."""

_FENCED = re.compile(r"```(?:json)?\s*\Z", re.IGNORECASE)
_REFUSED = object()
"""Stands for what strict JSON does not have: NaN, infinities, an object with a key twice."""


class UnreadableReplyError(ValueError):
    """A reply without a verdict. The message says what is wrong with it."""


def make_mark(question: str, texts: Sequence[str]) -> str:
    """Return the mark that the verdict must have, if a text that the judge reads looks like a verdict; otherwise empty.

    Without a mark, the judge's own verdict could not be told from one that it quotes from a completion. The completion
    could then be paid for verdicts that it states, or escape low scores. The mark is a digest of the question; a
    completion cannot contain it, because the question contains the completion.
    """
    is_stated = any(_STATED.search(_FILLING.sub(" ", text)) for text in texts)
    return hashlib.sha256(question.encode()).hexdigest()[:8] if is_stated else ""


def read_verdict(reply: str, read: Callable[[Any], Values], longest: int, mark: str = "") -> tuple[Any, Values]:
    """Return the verdict of a reply as its JSON value, and what ``read`` returns for it.

    The verdict is the only object of its kind in the reply, and the last thing in it, except white space or the end of
    its code block. Reasoning up to ``</think>`` is not read.

    Args:
        reply: the judge's reply.
        read: returns the values of the object, or raises :class:`UnreadableReplyError`.
        longest: the largest number of characters of a verdict.
        mark: the value of the key ``mark`` in the verdict, which is not part of the returned value. Objects without it
            are quotations of what the judge has read. Empty: the verdict has no such key.

    Raises:
        UnreadableReplyError: there is no such object.
    """
    _, thought_end, reply = reply.rpartition("</think>")
    if not thought_end and reply.lstrip().startswith("<think>"):
        raise UnreadableReplyError("its reasoning has no end")
    reply = reply.rstrip()
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
    if mark:
        marked = [value for _, _, value in objects if isinstance(value, dict) and value.get("mark") == mark]
        if not marked or marked[-1] is not verdict:
            raise UnreadableReplyError("its verdict lacks the mark, so that it may be a quotation")
        verdict = {key: value for key, value in verdict.items() if key != "mark"}
    if len(marked if mark else objects) > 1:
        raise UnreadableReplyError("it has several verdicts")
    return verdict, read(verdict)


def take_reasons(reply: str) -> str:
    """Return what a reply says before its verdict: the judge's reasons. Without a verdict, return the whole reply.

    Reasoning up to ``</think>`` is left out. The time is quadratic in the length of the reply.
    """
    reply = reply.rpartition("</think>")[2].strip()
    stripped = reply.removesuffix("```").rstrip()
    objects = list(_list_objects(stripped, [match.start() for match in _START.finditer(stripped)], len(stripped)))
    if not objects or objects[-1][1] != len(stripped):
        return reply
    return _FENCED.sub("", stripped[: objects[-1][0]]).rstrip()


def check_score(value: Any) -> float:
    """Return a score as a float.

    Raises:
        UnreadableReplyError: the score is not a number from 0 to 1; a boolean or a text does not count as a number.
    """
    if type(value) not in (int, float) or not 0 <= value <= 1:  # false for NaN
        raise UnreadableReplyError(f"a score is {_shorten(value)}, expected a number from 0 to 1")
    return float(value) + 0.0  # -0.0 becomes 0.0


def take_value(verdict: Any, key: str) -> Any:
    """Return the value of a verdict that has ``key`` and no other key.

    Raises:
        UnreadableReplyError: it has other keys.
    """
    if not isinstance(verdict, dict) or verdict.keys() != {key}:
        raise UnreadableReplyError(f"its verdict is {_shorten(verdict)}, expected an object with {key!r} alone")
    return verdict[key]


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
