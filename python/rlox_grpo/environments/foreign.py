"""Check the values that environments of other packages return."""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Mapping
from typing import Any

Messages = list[dict[str, Any]]


def make_name(text: str) -> str:
    """Convert ``text`` to a name in metrics: letters, digits, dots, dashes and underscores."""
    return re.sub(r"[^\w.-]+", "_", text).strip("_") or "environment"


def join_prompt(prompt: Any, first: str | Messages) -> str | Messages:
    """Return the first messages of an episode: the ``prompt`` of the row, if any, and the environment's first message.

    If ``first`` is text, it is appended to the last message of the prompt, after a blank line.

    Raises:
        TypeError: ``prompt`` is neither text nor a list of messages.
    """
    if prompt is None:
        return first
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, (list, tuple)) or not all(isinstance(message, Mapping) for message in prompt):
        raise TypeError(f"the column 'prompt' is {show(prompt)}: expected a text or a list of messages")
    messages = [dict(message) for message in prompt]
    if not isinstance(first, str):
        return messages + first
    if not messages or messages[-1].get("role") != "user" or not isinstance(messages[-1].get("content"), str):
        return [*messages, {"role": "user", "content": first}]
    messages[-1]["content"] += f"\n\n{first}"
    return messages


def check_message(message: Any, source: str) -> str | Messages:
    """Check that ``message``, returned by ``source``, is text or a list of role/content messages.

    Raises:
        TypeError: ``message`` is something else.
    """
    if isinstance(message, str):
        return message
    if (
        isinstance(message, (list, tuple))
        and message
        and all(isinstance(entry, Mapping) and "role" in entry and "content" in entry for entry in message)
    ):
        return [dict(entry) for entry in message]
    raise TypeError(f"{source} returned {show(message)}: expected a text, or a list of role/content messages")


def read_reward(value: Any, source: str) -> float:
    """Return the reward that ``source`` returned as a float.

    Raises:
        TypeError: the value is not a number.
        ValueError: the value is not finite.
    """
    return read_number(value, f"{source} returned the reward")


def read_number(value: Any, subject: str, or_else: str = "") -> float:
    """Return a number, or an array with one element, as a float.

    Args:
        value: the number.
        subject: beginning of the error, such as ``"step returned the reward"``.
        or_else: other values that the error names as expected.

    Raises:
        TypeError: the value is not a number.
        ValueError: the value is not finite.
    """
    if hasattr(value, "item") and math.prod(getattr(value, "shape", ())) == 1:
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise TypeError(f"{subject} {show(value)}: expected a number{or_else}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{subject} {number}: expected a finite number{or_else}")
    return number


def show(value: Any) -> str:
    """Return the type and the beginning of a value, for errors."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"
