"""Parse a reply into reasoning, tool calls and content. The text comes from a model and is not trusted.

There are six formats of tool calls, each with any number of calls in a reply:

``hermes``
    Hermes' and Qwen's ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``. Without this tag, a reply is read as
    ``json``.
``llama3``
    ``{"name": …, "parameters": {…}}``, optionally after ``<|python_tag|>``; calls are separated by ``;``.
``mistral``
    ``[TOOL_CALLS][{"name": …, "arguments": {…}}, …]``, or ``[TOOL_CALLS]name[ARGS]{…}`` for each call. Without this
    token, a reply is read as ``json``.
``qwen_xml``
    Qwen3-Coder's, Qwen 3.5's and Nemotron's ``<tool_call><function=name><parameter=x>…</parameter></function>
    </tool_call>``.
``glm``
    GLM 4.5's ``<tool_call>name<arg_key>x</arg_key><arg_value>…</arg_value></tool_call>``.
``json``
    A reply that is one JSON object ``{"name": …, "arguments": {…}}`` or a list of them.

Arguments in tags are text. The JSON schemas of the tools define which of them are numbers, booleans, lists or objects.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

CallFormat: TypeAlias = Literal["hermes", "llama3", "mistral", "qwen_xml", "glm", "json"]
Call: TypeAlias = "tuple[str, Mapping[str, Any]]"
"""Name and arguments."""
Schemas: TypeAlias = "Sequence[Mapping[str, Any]]"

MAX_CALLS = 64
"""Maximum number of calls in one reply. More calls are a parse error."""

_PYTHON, _CALLS, _ARGS, _CALL_ID = "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_UNCLOSED = f"a {_OPEN} is not closed by {_CLOSE}"
FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
MARKS: Mapping[CallFormat, tuple[str, ...]] = {
    "hermes": (_OPEN, _CLOSE),
    "llama3": (_PYTHON,),
    "mistral": (_CALLS, _ARGS, _CALL_ID),
    "qwen_xml": (_OPEN, _CLOSE),
    "glm": (_OPEN, _CLOSE, _KEY, _KEY_END, _VALUE, _VALUE_END),
    "json": (),
}
"""Tags of each format. If a tokenizer has one of them as a special token, replies are decoded with special tokens."""
THINK, THOUGHT = "<think>", "</think>"

_SPACE = re.compile(r"\s*")
_CONSTANTS = {"True": True, "False": False, "None": None}
"""Constants of Qwen's chat template, parsed in addition to JSON's."""
_KINDS: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


class ToolCallError(ValueError):
    """A malformed tool call; the policy gets the message."""


@dataclass(frozen=True)
class ParsedReply:
    """The parts of a reply's text. ``calls`` are pairs of name and arguments; ``error`` describes a malformed call."""

    content: str
    reasoning: str | None
    calls: tuple[Call, ...]
    error: str | None = None


def parse_reply(
    text: str,
    *,
    with_tools: bool,
    call_format: CallFormat = "hermes",
    schemas: Schemas | None = None,
) -> ParsedReply:
    """Split the text of a reply.

    Args:
        text: the reply.
        with_tools: whether tool calls are parsed.
        call_format: the format of tool calls.
        schemas: JSON schemas of the tools, with the types of the arguments of ``qwen_xml`` and ``glm``.
    """
    reasoning, content = _split_reasoning(text)
    if not with_tools:
        return ParsedReply(content, reasoning, ())
    try:
        rest, calls = _READERS[call_format](content, schemas or ())
        if len(calls) > MAX_CALLS:
            raise ToolCallError(f"more than {MAX_CALLS} tool calls in one reply")
    except ToolCallError as error:
        return ParsedReply(content, reasoning, (), str(error))
    return ParsedReply(rest, reasoning, tuple(calls))


def drop_tokens(text: str, tokens: Iterable[str]) -> str:
    """Remove every occurrence of ``tokens`` from ``text``."""
    for token in tokens:
        text = text.replace(token, "")
    return text


def _split_reasoning(text: str) -> tuple[str | None, str]:
    before, mark, after = text.partition(THOUGHT)
    if not mark:
        return None, text
    return before.partition(THINK)[2].strip("\n") if THINK in before else before.strip("\n"), after.lstrip("\n")


def _read_json(text: str, schemas: Schemas = ()) -> tuple[str, list[Call]]:
    bare = text.strip()
    if not (bare.startswith(("{", "[")) and '"name"' in bare):
        return text, []
    value = _parse_json(bare)
    return "", [_read_call(call) for call in (value if isinstance(value, list) else [value])]


def _read_llama(text: str, schemas: Schemas) -> tuple[str, list[Call]]:
    before, is_marked, after = text.partition(_PYTHON)
    body = (after if is_marked else text).strip()
    if not is_marked and not (body.startswith("{") and '"name"' in body):
        return _read_json(text)
    calls: list[Call] = []
    while body and len(calls) <= MAX_CALLS:
        value, end = _parse_first(body)
        calls.append(_read_call(value))
        body = body[end:].lstrip("; \n\t\r")
    if not calls:
        raise ToolCallError(f'{_PYTHON} must be followed by {{"name": …, "parameters": {{…}}}}')
    return before.strip("\n") if is_marked else "", calls


def _read_mistral(text: str, schemas: Schemas) -> tuple[str, list[Call]]:
    before, *bodies = text.split(_CALLS)
    if not bodies:
        return _read_json(text)
    calls: list[Call] = []
    for body in bodies[: MAX_CALLS + 1]:
        if body.strip().startswith("["):
            calls += map(_read_call, _parse_json(body))
            continue
        name, brace, content = body.partition("{")
        name = name.partition(_ARGS)[0].partition(_CALL_ID)[0].strip()
        if not name or not brace:
            raise ToolCallError(f"{_CALLS} must be followed by a list of calls, or by name{_ARGS}{{…}}")
        calls.append(_read_call({"name": name, "arguments": _parse_json(brace + content)}))
    return before.strip("\n"), calls


def _read_hermes(text: str, schemas: Schemas) -> tuple[str, list[Call]]:
    def read(cursor: _Cursor) -> Call:
        cursor.take(_OPEN)
        return _read_call(_parse_json(cursor.read_until(_CLOSE, _UNCLOSED)))

    return _scan_calls(text, (_OPEN,), read) if _OPEN in text else _read_json(text)


def _read_qwen_xml(text: str, schemas: Schemas) -> tuple[str, list[Call]]:
    """Read calls in tags. The outer tag may be missing, because models sometimes omit it."""

    def read(cursor: _Cursor) -> Call:
        is_open = cursor.take(_OPEN)
        name = cursor.read_name(FUNCTION, f"{_OPEN} must be followed by {FUNCTION}name>")
        arguments: dict[str, Any] = {}
        while not cursor.take(_FUNCTION_END):
            message = f"in {FUNCTION}{name[:80]}> expected {_PARAMETER}name> or {_FUNCTION_END}"
            key = cursor.read_name(_PARAMETER, message)
            value = cursor.read_until(_PARAMETER_END).removeprefix("\n").removesuffix("\n")
            _add(arguments, name, key, value, schemas)
        if not cursor.take(_CLOSE) and is_open:
            raise ToolCallError(_UNCLOSED)
        return name, arguments

    return _scan_calls(text, (_OPEN, FUNCTION), read)


def _read_glm(text: str, schemas: Schemas) -> tuple[str, list[Call]]:
    def read(cursor: _Cursor) -> Call:
        cursor.take(_OPEN)
        end = _find_first(text, (_KEY, _CLOSE), cursor.offset)
        if end < 0:
            raise ToolCallError(_UNCLOSED)
        name, cursor.offset = text[cursor.offset : end].strip(), end
        if not name:
            raise ToolCallError(f"{_OPEN} must be followed by the name of a tool")
        arguments: dict[str, Any] = {}
        while not cursor.take(_CLOSE):
            cursor.expect(_KEY, f"in the call of {name[:80]} expected {_KEY} or {_CLOSE}")
            key = cursor.read_until(_KEY_END)
            cursor.expect(_VALUE, f"in the call of {name[:80]} expected {_VALUE} or {_CLOSE}")
            _add(arguments, name, key.strip(), cursor.read_until(_VALUE_END), schemas)
        return name, arguments

    return _scan_calls(text, (_OPEN,), read)


_READERS: Mapping[CallFormat, Callable[[str, Schemas], tuple[str, list[Call]]]] = {
    "hermes": _read_hermes,
    "llama3": _read_llama,
    "mistral": _read_mistral,
    "qwen_xml": _read_qwen_xml,
    "glm": _read_glm,
    "json": _read_json,
}


def _read_call(value: Any) -> Call:
    call = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ToolCallError('a tool call must be {"name": …, "arguments": {…}}')
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _parse_json(arguments)
    if not isinstance(arguments, dict):
        raise ToolCallError(f"the arguments of {call['name'][:80]} must be a JSON object")
    return call["name"], arguments


class _Cursor:
    """A position in a text, which moves on as tags are read."""

    def __init__(self, text: str, offset: int) -> None:
        self.text, self.offset = text, offset

    def take(self, tag: str) -> bool:
        """Move past ``tag`` if it follows, possibly after white space."""
        space = _SPACE.match(self.text, self.offset)
        start = self.offset if space is None else space.end()
        follows = self.text.startswith(tag, start)
        if follows:
            self.offset = start + len(tag)
        return follows

    def expect(self, tag: str, message: str) -> None:
        """Move behind ``tag``. Raises ToolCallError with the text ``message`` if something else follows."""
        if not self.take(tag):
            raise ToolCallError(message)

    def read_until(self, tag: str, message: str | None = None) -> str:
        """Return the text before the next ``tag``, and move past the tag. Raises ToolCallError if there is none."""
        start, end = self.offset, self.text.find(tag, self.offset)
        if end < 0:
            raise ToolCallError(message or f"a tool call lacks {tag}")
        self.offset = end + len(tag)
        return self.text[start:end]

    def read_name(self, tag: str, message: str) -> str:
        """Read ``<tag=name>``; returns the name."""
        self.expect(tag, message)
        message = f"{tag} must be followed by a name and >"
        name = self.read_until(">", message).strip()
        if not name:
            raise ToolCallError(message)
        return name


def _scan_calls(text: str, tags: Sequence[str], read: Callable[[_Cursor], Call]) -> tuple[str, list[Call]]:
    """Return the text without the calls, and the calls. A call begins with one of ``tags``, and ``read`` reads it."""
    rest: list[str] = []
    calls: list[Call] = []
    cursor = _Cursor(text, 0)
    while len(calls) <= MAX_CALLS and (start := _find_first(text, tags, cursor.offset)) >= 0:
        rest.append(text[cursor.offset : start])
        cursor.offset = start
        calls.append(read(cursor))
    return "".join([*rest, text[cursor.offset :]]).strip("\n"), calls


def _find_first(text: str, tags: Sequence[str], start: int) -> int:
    return min((position for tag in tags if (position := text.find(tag, start)) >= 0), default=-1)


def _add(arguments: dict[str, Any], name: str, key: str, text: str, schemas: Schemas) -> None:
    if key in arguments:
        raise ToolCallError(f"the argument {key[:80]} of {name[:80]} is given twice")
    arguments[key] = _read_value(text, _find_types(schemas, name, key), f"{key[:80]} of {name[:80]}")


def _read_value(text: str, types: Sequence[str], name: str) -> Any:
    """Convert ``text`` to one of the JSON types ``types``; if there are none, return it as text."""
    if not types or [*types] == ["string"]:
        return text
    bare = text.strip()
    try:
        value = _CONSTANTS[bare] if bare in _CONSTANTS else _parse_json(bare)
    except ToolCallError:
        value = text
    for kind in types:
        if isinstance(value, _KINDS[kind]) and (kind == "boolean" or not isinstance(value, bool)):
            return value
    if "string" in types:
        return text
    raise ToolCallError(f"the argument {name} must be of type {' or '.join(types)}, got {text[:80]!r}")


def _find_types(schemas: Schemas, name: str, key: str) -> list[str]:
    """The JSON types of an argument; empty if no schema has them."""
    for schema in schemas:
        function = schema.get("function", schema)
        if not isinstance(function, Mapping) or function.get("name") != name:
            continue
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        stated = properties.get(key) if isinstance(properties, Mapping) else None
        return _list_types(stated) if isinstance(stated, Mapping) else []
    return []


def _list_types(stated: Mapping[str, Any]) -> list[str]:
    options, stated_type = stated.get("anyOf"), stated.get("type")
    candidates = [*stated_type] if isinstance(stated_type, list) else [stated_type]
    if isinstance(options, list):
        candidates += [option.get("type") for option in options if isinstance(option, Mapping)]
    kinds = [kind for kind in candidates if isinstance(kind, str) and kind in _KINDS]
    return [*kinds, "null"] if kinds and stated.get("nullable") is True else kinds


def _parse_json(text: str) -> Any:
    """Parse ``text`` as one JSON value.

    Raises:
        ToolCallError: the text is not JSON, or there is text after the value.
    """
    text = text.strip()
    value, end = _parse_first(text)
    if end < len(text):
        raise ToolCallError(f"a tool call is not JSON: extra data at character {end}")
    return value


def _parse_first(text: str) -> tuple[Any, int]:
    """Parse the JSON value at the beginning of ``text``; returns the value and its end.

    Raises:
        ToolCallError: there is none.
    """
    try:
        return _DECODER.raw_decode(text)
    except (ValueError, RecursionError) as error:  # ValueError also for an integer with too many digits
        raise ToolCallError(f"a tool call is not JSON: {str(error)[:200]}") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _read_number(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text[:40]} is too large")
    return number


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_read_number)
