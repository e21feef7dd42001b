"""Parse tool calls that are written in tags. The text comes from a model and is not trusted.

Arguments are text. The JSON schemas of the tools define which arguments are numbers, booleans, lists or objects. A text
that is not of its type is an error message for the policy.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

MAX_CALLS = 64
"""Maximum number of calls in one reply; more are a parse error."""

TOO_MANY = f"more than {MAX_CALLS} tool calls in one reply"

Call: TypeAlias = "tuple[str, Mapping[str, Any]]"
"""Name and arguments."""

Calls: TypeAlias = "tuple[Call, ...]"


class ToolCallError(ValueError):
    """A malformed tool call; the policy gets the message."""


def parse_json(text: str) -> Any:
    """Parse ``text`` as one JSON value.

    Raises:
        ToolCallError: not JSON, or text after the value.
    """
    text = text.strip()
    found, end = parse_first(text)
    if end < len(text):
        raise ToolCallError(f"a tool call is not JSON: extra data at character {end}")
    return found


def parse_first(text: str) -> tuple[Any, int]:
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


OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
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

Schemas = Sequence[Mapping[str, Any]]


def scan_calls(text: str, tags: Sequence[str], read: Callable[[int], tuple[Call, int]]) -> tuple[str, Calls]:
    """Return the text without the calls, and the calls, each of which begins with one of ``tags``.

    ``read(start)`` parses the call at ``start``, and returns it and its end.
    """
    rest: list[str] = []
    calls: list[Call] = []
    place = 0
    while (start := _find_first(text, tags, place)) >= 0:
        if len(calls) == MAX_CALLS:
            raise ToolCallError(TOO_MANY)
        rest.append(text[place:start])
        call, place = read(start)
        calls.append(call)
    return "".join([*rest, text[place:]]).strip("\n"), tuple(calls)


def read_qwen_xml(text: str, schemas: Schemas) -> tuple[str, Calls]:
    """Read ``<tool_call><function=name><parameter=x>…</parameter></function></tool_call>``; see :func:`read_glm`.

    The outer tag may be missing, because these models sometimes omit it.
    """

    def read(start: int) -> tuple[Call, int]:
        is_open = text.startswith(OPEN, start)
        place = _skip(text, start + len(OPEN)) if is_open else start
        name, place = _read_tag(text, place, FUNCTION, f"{OPEN} must be followed by {FUNCTION}name>")
        arguments: dict[str, Any] = {}
        while not text.startswith(_FUNCTION_END, place := _skip(text, place)):
            told = f"in {FUNCTION}{name[:80]}> expected {_PARAMETER}name> or {_FUNCTION_END}"
            key, place = _read_tag(text, place, _PARAMETER, told)
            value, place = _read_until(text, place, _PARAMETER_END)
            value = value.removeprefix("\n").removesuffix("\n")
            _add(arguments, name, key, value, schemas)
        place += len(_FUNCTION_END)
        after = _skip(text, place)
        if text.startswith(CLOSE, after):
            place = after + len(CLOSE)
        elif is_open:
            raise ToolCallError(f"a {OPEN} is not closed by {CLOSE}")
        return (name, arguments), place

    return scan_calls(text, (OPEN, FUNCTION), read)


def read_glm(text: str, schemas: Schemas) -> tuple[str, Calls]:
    """Read ``<tool_call>name<arg_key>x</arg_key><arg_value>…</arg_value></tool_call>``, any number of them.

    Returns:
        The text without the calls, and the calls.

    Raises:
        ToolCallError: a missing or unexpected tag, a value that is not of its schema's type, a repeated argument, or
            more than ``MAX_CALLS`` calls.
    """

    def read(start: int) -> tuple[Call, int]:
        begin = start + len(OPEN)
        place = _find_first(text, (KEY, CLOSE), begin)
        if place < 0:
            raise ToolCallError(f"a {OPEN} is not closed by {CLOSE}")
        name = text[begin:place].strip()
        if not name:
            raise ToolCallError(f"{OPEN} must be followed by the name of a tool")
        arguments: dict[str, Any] = {}
        while not text.startswith(CLOSE, place := _skip(text, place)):
            told = f"in the call of {name[:80]} expected {{}} or {CLOSE}"
            key, place = _read_until(text, _expect(text, place, KEY, told), KEY_END)
            value, place = _read_until(text, _expect(text, _skip(text, place), VALUE, told), VALUE_END)
            _add(arguments, name, key.strip(), value, schemas)
        return (name, arguments), place + len(CLOSE)

    return scan_calls(text, (OPEN,), read)


def _add(arguments: dict[str, Any], name: str, key: str, text: str, schemas: Schemas) -> None:
    if key in arguments:
        raise ToolCallError(f"the argument {key[:80]} of {name[:80]} is given twice")
    arguments[key] = _read_value(text, _find_types(schemas, name, key), f"{key[:80]} of {name[:80]}")


def _read_value(text: str, types: Sequence[str], name: str) -> Any:
    """Convert ``text`` to one of the JSON types ``types``; leave it as text if there are none."""
    if not types or [*types] == ["string"]:
        return text
    bare = text.strip()
    try:
        value = _CONSTANTS[bare] if bare in _CONSTANTS else parse_json(bare)
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
    options, own = stated.get("anyOf"), stated.get("type")
    found = [*own] if isinstance(own, list) else [own]
    if isinstance(options, list):
        found += [option.get("type") for option in options if isinstance(option, Mapping)]
    known = [kind for kind in found if isinstance(kind, str) and kind in _KINDS]
    return [*known, "null"] if known and stated.get("nullable") is True else known


def _read_tag(text: str, place: int, tag: str, told: str) -> tuple[str, int]:
    """Parse ``<tag=name>``; returns the name and the end."""
    start = _expect(text, place, tag, told)
    end = text.find(">", start)
    name = text[start:end].strip() if end >= 0 else ""
    if not name:
        raise ToolCallError(f"{tag} must be followed by a name and >")
    return name, end + 1


def _expect(text: str, place: int, tag: str, told: str) -> int:
    """Return the end of ``tag``, which must be at ``place``."""
    if not text.startswith(tag, place):
        raise ToolCallError(told.replace("{}", tag))
    return place + len(tag)


def _read_until(text: str, place: int, tag: str) -> tuple[str, int]:
    end = text.find(tag, place)
    if end < 0:
        raise ToolCallError(f"a tool call lacks {tag}")
    return text[place:end], end + len(tag)


def _skip(text: str, place: int) -> int:
    """Skip white space."""
    found = _SPACE.match(text, place)
    return found.end() if found is not None else place


def _find_first(text: str, tags: Sequence[str], place: int) -> int:
    return min((found for tag in tags if (found := text.find(tag, place)) >= 0), default=-1)
