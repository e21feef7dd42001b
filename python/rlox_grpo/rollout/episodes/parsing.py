"""Parse a reply: reasoning, tool calls, and what remains. The text is a model's: nothing in it is trusted.

Four forms of tool calls are read, each with any number of calls in a reply:

``hermes``
    Hermes' and Qwen's ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``; without that tag as ``json``.
``llama3``
    ``{"name": …, "parameters": {…}}``, perhaps behind ``<|python_tag|>``; several are separated by ``;``.
``mistral``
    ``[TOOL_CALLS][{"name": …, "arguments": {…}}, …]``, or ``[TOOL_CALLS]name[ARGS]{…}`` for each call; without that
    token as ``json``.
``json``
    A reply that is one JSON object ``{"name": …, "arguments": {…}}`` or a list of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

MAX_CALLS = 64
"""Calls of one reply beyond these are a parse error."""

CallFormat: TypeAlias = Literal["hermes", "llama3", "mistral", "json"]

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON, _CALLS, _ARGS, _CALL_ID = "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
MARKS: Mapping[CallFormat, tuple[str, ...]] = {
    "hermes": (_OPEN, _CLOSE),
    "llama3": (_PYTHON,),
    "mistral": (_CALLS, _ARGS, _CALL_ID),
    "json": (),
}
"""What each form writes beside JSON. Where a tokenizer has one as a special token, it is read before it is dropped."""
_THINK, _THOUGHT = "<think>", "</think>"


_TOO_MANY = f"more than {MAX_CALLS} tool calls in one reply"

Calls: TypeAlias = "tuple[tuple[str, Mapping[str, Any]], ...]"


class ToolCallError(ValueError):
    """A tool call that cannot be read; the message is written for the policy."""


@dataclass(frozen=True)
class ParsedReply:
    """The parts of a reply's text; ``calls`` are pairs of name and arguments."""

    content: str
    reasoning: str | None
    calls: tuple[tuple[str, Mapping[str, Any]], ...]
    error: str | None = None


def parse_reply(text: str, *, with_tools: bool, call_format: CallFormat = "hermes") -> ParsedReply:
    """Split ``text``. Without tools, nothing is read as a call."""
    reasoning, content = _split_reasoning(text)
    if not with_tools:
        return ParsedReply(content, reasoning, ())
    try:
        rest, calls = _READERS[call_format](content)
    except ToolCallError as error:
        return ParsedReply(content, reasoning, (), str(error))
    return ParsedReply(rest, reasoning, calls)


def _split_reasoning(text: str) -> tuple[str | None, str]:
    before, found, after = text.partition(_THOUGHT)
    if not found:
        return None, text
    return before.partition(_THINK)[2].strip("\n") if _THINK in before else before.strip("\n"), after.lstrip("\n")


def _read_json(text: str) -> tuple[str, Calls]:
    bare = text.strip()
    if not (bare.startswith(("{", "[")) and '"name"' in bare):
        return text, ()
    found = _parse_json(bare)
    return "", _read_list(found if isinstance(found, list) else [found])


def _read_list(found: list[Any]) -> Calls:
    if len(found) > MAX_CALLS:
        raise ToolCallError(_TOO_MANY)
    return tuple(_read_call(call) for call in found)


def _read_llama(text: str) -> tuple[str, Calls]:
    before, is_marked, after = text.partition(_PYTHON)
    body = (after if is_marked else text).strip()
    if not is_marked and not (body.startswith("{") and '"name"' in body):
        return _read_json(text)
    calls: list[tuple[str, Mapping[str, Any]]] = []
    while body:
        if len(calls) == MAX_CALLS:
            raise ToolCallError(_TOO_MANY)
        found, end = _parse_first(body)
        calls.append(_read_call(found))
        body = body[end:].lstrip("; \n\t\r")
    if not calls:
        raise ToolCallError(f'{_PYTHON} must be followed by {{"name": …, "parameters": {{…}}}}')
    return before.strip("\n") if is_marked else "", tuple(calls)


def _read_mistral(text: str) -> tuple[str, Calls]:
    before, is_marked, after = text.partition(_CALLS)
    if not is_marked:
        return _read_json(text)
    parts = after.split(_CALLS, MAX_CALLS)
    if len(parts) > MAX_CALLS:
        raise ToolCallError(_TOO_MANY)
    calls: list[tuple[str, Mapping[str, Any]]] = []
    for part in parts:
        if part.strip().startswith("["):
            found = _parse_json(part)
            calls += _read_list(found)
            continue
        name, brace, given = part.partition("{")
        name = name.partition(_ARGS)[0].partition(_CALL_ID)[0].strip()
        if not name or not brace:
            raise ToolCallError(f"{_CALLS} must be followed by a list of calls, or by name{_ARGS}{{…}}")
        calls.append(_read_call({"name": name, "arguments": _parse_json(brace + given)}))
    if len(calls) > MAX_CALLS:
        raise ToolCallError(_TOO_MANY)
    return before.strip("\n"), tuple(calls)


def _read_hermes(text: str) -> tuple[str, Calls]:
    if _OPEN not in text:
        return _read_json(text)
    rest: list[str] = []
    calls: list[tuple[str, Mapping[str, Any]]] = []
    place = 0
    while (start := text.find(_OPEN, place)) >= 0:
        end = text.find(_CLOSE, start)
        if end < 0:
            raise ToolCallError(f"a {_OPEN} is not closed by {_CLOSE}")
        if len(calls) == MAX_CALLS:
            raise ToolCallError(_TOO_MANY)
        calls.append(_read_call(_parse_json(text[start + len(_OPEN) : end])))
        rest.append(text[place:start])
        place = end + len(_CLOSE)
    return "".join([*rest, text[place:]]).strip("\n"), tuple(calls)


_READERS: Mapping[CallFormat, Callable[[str], tuple[str, Calls]]] = {
    "hermes": _read_hermes,
    "llama3": _read_llama,
    "mistral": _read_mistral,
    "json": _read_json,
}


def _parse_json(text: str) -> Any:
    text = text.strip()
    found, end = _parse_first(text)
    if end < len(text):
        raise ToolCallError(f"a tool call is not JSON: extra data at character {end}")
    return found


def _parse_first(text: str) -> tuple[Any, int]:
    """The JSON value that ``text`` begins with, and where it ends."""
    try:
        return _DECODER.raw_decode(text)
    except (ValueError, RecursionError) as error:  # ValueError: also an integer of too many digits
        raise ToolCallError(f"a tool call is not JSON: {str(error)[:200]}") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _read_number(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text[:40]} is too large")
    return number


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_read_number)


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
