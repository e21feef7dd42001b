"""Parse a reply: reasoning, tool calls, and what remains. The text is a model's: nothing in it is trusted.

Two forms of a tool call are read: Hermes' and Qwen's ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, any
number of them in a reply, and a reply that is one such JSON object or a list of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_CALLS = 64
"""Calls of one reply beyond these are a parse error."""

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_THINK, _THOUGHT = "<think>", "</think>"


class ToolCallError(ValueError):
    """A tool call that cannot be read; the message is written for the policy."""


@dataclass(frozen=True)
class ParsedReply:
    """The parts of a reply's text; ``calls`` are pairs of name and arguments."""

    content: str
    reasoning: str | None
    calls: tuple[tuple[str, Mapping[str, Any]], ...]
    error: str | None = None


def parse_reply(text: str, *, with_tools: bool) -> ParsedReply:
    """Split ``text``. Without tools, nothing is read as a call."""
    reasoning, content = _split_reasoning(text)
    if not with_tools:
        return ParsedReply(content, reasoning, ())
    try:
        rest, calls = _read_calls(content)
    except ToolCallError as error:
        return ParsedReply(content, reasoning, (), str(error))
    return ParsedReply(rest, reasoning, calls)


def _split_reasoning(text: str) -> tuple[str | None, str]:
    before, found, after = text.partition(_THOUGHT)
    if not found:
        return None, text
    return before.partition(_THINK)[2].strip("\n") if _THINK in before else before.strip("\n"), after.lstrip("\n")


def _read_calls(text: str) -> tuple[str, tuple[tuple[str, Mapping[str, Any]], ...]]:
    if _OPEN not in text:
        bare = text.strip()
        if bare.startswith(("{", "[")) and '"name"' in bare:
            found = _parse_json(bare)
            return "", tuple(_read_call(call) for call in (found if isinstance(found, list) else [found]))
        return text, ()
    rest: list[str] = []
    calls: list[tuple[str, Mapping[str, Any]]] = []
    place = 0
    while (start := text.find(_OPEN, place)) >= 0:
        end = text.find(_CLOSE, start)
        if end < 0:
            raise ToolCallError(f"a {_OPEN} is not closed by {_CLOSE}")
        if len(calls) == MAX_CALLS:
            raise ToolCallError(f"more than {MAX_CALLS} tool calls in one reply")
        calls.append(_read_call(_parse_json(text[start + len(_OPEN) : end])))
        rest.append(text[place:start])
        place = end + len(_CLOSE)
    return "".join([*rest, text[place:]]).strip("\n"), tuple(calls)


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # ValueError: also an integer of too many digits
        raise ToolCallError(f"a tool call is not JSON: {str(error)[:200]}") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _read_call(found: Any) -> tuple[str, Mapping[str, Any]]:
    call = found.get("function", found) if isinstance(found, dict) else None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ToolCallError('a tool call must be {"name": …, "arguments": {…}}')
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _parse_json(arguments)
    if not isinstance(arguments, dict):
        raise ToolCallError(f"the arguments of {call['name'][:80]} must be a JSON object")
    return call["name"], arguments
