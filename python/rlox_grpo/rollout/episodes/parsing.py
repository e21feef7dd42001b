"""Parse a reply into reasoning, tool calls and content. The text comes from a model and is not trusted.

There are six formats of tool calls, each with any number of calls in a reply:

``hermes``
    Hermes' and Qwen's ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``; without that tag as ``json``.
``llama3``
    ``{"name": …, "parameters": {…}}``, optionally after ``<|python_tag|>``; calls are separated by ``;``.
``mistral``
    ``[TOOL_CALLS][{"name": …, "arguments": {…}}, …]``, or ``[TOOL_CALLS]name[ARGS]{…}`` for each call; without that
    token as ``json``.
``qwen_xml``
    Qwen3-Coder's, Qwen 3.5's and Nemotron's ``<tool_call><function=name><parameter=x>…</parameter></function>
    </tool_call>``.
``glm``
    GLM 4.5's ``<tool_call>name<arg_key>x</arg_key><arg_value>…</arg_value></tool_call>``.
``json``
    A reply that is one JSON object ``{"name": …, "arguments": {…}}`` or a list of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from rlox_grpo.rollout.episodes.xml_calls import (
    CLOSE,
    KEY,
    KEY_END,
    MAX_CALLS,
    OPEN,
    TOO_MANY,
    VALUE,
    VALUE_END,
    Call,
    Calls,
    Schemas,
    ToolCallError,
    parse_first,
    parse_json,
    read_glm,
    read_qwen_xml,
    scan_calls,
)

CallFormat: TypeAlias = Literal["hermes", "llama3", "mistral", "qwen_xml", "glm", "json"]

_PYTHON, _CALLS, _ARGS, _CALL_ID = "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
MARKS: Mapping[CallFormat, tuple[str, ...]] = {
    "hermes": (OPEN, CLOSE),
    "llama3": (_PYTHON,),
    "mistral": (_CALLS, _ARGS, _CALL_ID),
    "qwen_xml": (OPEN, CLOSE),
    "glm": (OPEN, CLOSE, KEY, KEY_END, VALUE, VALUE_END),
    "json": (),
}
"""Tags of each format. If a tokenizer has one as a special token, replies are decoded with special tokens."""
THINK, THOUGHT = "<think>", "</think>"


@dataclass(frozen=True)
class ParsedReply:
    """The parts of a reply's text. ``calls`` are pairs of name and arguments; ``error`` describes a malformed call."""

    content: str
    reasoning: str | None
    calls: tuple[tuple[str, Mapping[str, Any]], ...]
    error: str | None = None


def parse_reply(
    text: str,
    *,
    with_tools: bool,
    call_format: CallFormat = "hermes",
    schemas: Sequence[Mapping[str, Any]] | None = None,
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
    except ToolCallError as error:
        return ParsedReply(content, reasoning, (), str(error))
    return ParsedReply(rest, reasoning, calls)


def drop_tokens(text: str, tokens: Iterable[str]) -> str:
    """Remove every occurrence of ``tokens`` from ``text``."""
    for token in tokens:
        text = text.replace(token, "")
    return text


def _split_reasoning(text: str) -> tuple[str | None, str]:
    before, found, after = text.partition(THOUGHT)
    if not found:
        return None, text
    return before.partition(THINK)[2].strip("\n") if THINK in before else before.strip("\n"), after.lstrip("\n")


def _read_json(text: str, schemas: Schemas = ()) -> tuple[str, Calls]:
    bare = text.strip()
    if not (bare.startswith(("{", "[")) and '"name"' in bare):
        return text, ()
    found = parse_json(bare)
    return "", _read_list(found if isinstance(found, list) else [found])


def _read_list(found: list[Any]) -> Calls:
    if len(found) > MAX_CALLS:
        raise ToolCallError(TOO_MANY)
    return tuple(_read_call(call) for call in found)


def _read_llama(text: str, schemas: Schemas) -> tuple[str, Calls]:
    before, is_marked, after = text.partition(_PYTHON)
    body = (after if is_marked else text).strip()
    if not is_marked and not (body.startswith("{") and '"name"' in body):
        return _read_json(text)
    calls: list[Call] = []
    while body:
        if len(calls) == MAX_CALLS:
            raise ToolCallError(TOO_MANY)
        found, end = parse_first(body)
        calls.append(_read_call(found))
        body = body[end:].lstrip("; \n\t\r")
    if not calls:
        raise ToolCallError(f'{_PYTHON} must be followed by {{"name": …, "parameters": {{…}}}}')
    return before.strip("\n") if is_marked else "", tuple(calls)


def _read_mistral(text: str, schemas: Schemas) -> tuple[str, Calls]:
    before, is_marked, after = text.partition(_CALLS)
    if not is_marked:
        return _read_json(text)
    parts = after.split(_CALLS, MAX_CALLS)
    if len(parts) > MAX_CALLS:
        raise ToolCallError(TOO_MANY)
    calls: list[Call] = []
    for part in parts:
        if part.strip().startswith("["):
            found = parse_json(part)
            calls += _read_list(found)
            continue
        name, brace, given = part.partition("{")
        name = name.partition(_ARGS)[0].partition(_CALL_ID)[0].strip()
        if not name or not brace:
            raise ToolCallError(f"{_CALLS} must be followed by a list of calls, or by name{_ARGS}{{…}}")
        calls.append(_read_call({"name": name, "arguments": parse_json(brace + given)}))
    if len(calls) > MAX_CALLS:
        raise ToolCallError(TOO_MANY)
    return before.strip("\n"), tuple(calls)


def _read_hermes(text: str, schemas: Schemas) -> tuple[str, Calls]:
    def read(start: int) -> tuple[Call, int]:
        end = text.find(CLOSE, start)
        if end < 0:
            raise ToolCallError(f"a {OPEN} is not closed by {CLOSE}")
        return _read_call(parse_json(text[start + len(OPEN) : end])), end + len(CLOSE)

    return scan_calls(text, (OPEN,), read) if OPEN in text else _read_json(text)


_READERS: Mapping[CallFormat, Callable[[str, Schemas], tuple[str, Calls]]] = {
    "hermes": _read_hermes,
    "llama3": _read_llama,
    "mistral": _read_mistral,
    "qwen_xml": read_qwen_xml,
    "glm": read_glm,
    "json": _read_json,
}


def _read_call(found: Any) -> Call:
    call = found.get("function", found) if isinstance(found, dict) else None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ToolCallError('a tool call must be {"name": …, "arguments": {…}}')
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = parse_json(arguments)
    if not isinstance(arguments, dict):
        raise ToolCallError(f"the arguments of {call['name'][:80]} must be a JSON object")
    return call["name"], arguments
