"""JSON values in tool calls, bounded and checked. The text is a model's: nothing in it is trusted."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, TypeAlias

MAX_CALLS = 64
"""Calls of one reply beyond these are a parse error."""

TOO_MANY = f"more than {MAX_CALLS} tool calls in one reply"

Calls: TypeAlias = "tuple[tuple[str, Mapping[str, Any]], ...]"
"""Pairs of name and arguments."""


class ToolCallError(ValueError):
    """A tool call that cannot be read; the message is written for the policy."""


def parse_json(text: str) -> Any:
    """The JSON value that ``text`` is.

    Raises:
        ToolCallError: it is none.
    """
    text = text.strip()
    found, end = parse_first(text)
    if end < len(text):
        raise ToolCallError(f"a tool call is not JSON: extra data at character {end}")
    return found


def parse_first(text: str) -> tuple[Any, int]:
    """The JSON value that ``text`` begins with, and where it ends.

    Raises:
        ToolCallError: it begins with none.
    """
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
