"""Change rows before they are tokenised: rename columns, add a system message."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

logger = logging.getLogger(__name__)

RESERVED = ("add_generation_prompt", "continue_final_message", "conversation", "messages", "tokenize")
"""Variables of a chat template that are set for each prompt. The user cannot set them."""


def rename_columns(row: Mapping[str, Any], renamed: Mapping[str, str], index: int) -> Mapping[str, Any]:
    """Return the row with columns renamed by ``renamed``, new name → name in the row.

    The name ``reward_model.ground_truth`` is a column of this name, or the key ``ground_truth`` of the dict in the
    column ``reward_model``, which stays in the row.

    Raises:
        ValueError: the row lacks a column.
    """
    if not renamed:
        return row
    values = {}
    for new, name in renamed.items():
        try:
            values[new] = _find_value(row, name)
        except KeyError:
            option = f"prompt_column={name!r}" if new == "prompt" else f"columns={{{new!r}: {name!r}}}"
            is_turned = new in row and new != "prompt"
            turned = f"; write the new name first: columns={{{name!r}: {new!r}}}" if is_turned else ""
            raise ValueError(
                f"{option}: prompts[{index}] has no {name!r} column; it has {', '.join(map(repr, row))}{turned}"
            ) from None
    other_columns = {name: value for name, value in row.items() if name not in renamed.values()}
    return {**other_columns, **values}


def _find_value(row: Mapping[str, Any], name: str) -> Any:
    """Return the value of a column, or of a key in it. Raises KeyError if there is none."""
    if name in row:
        return row[name]
    value: Any = row
    for key in name.split("."):
        if not isinstance(value, Mapping):
            raise KeyError(key)
        value = value[key]
    return value


def warn_about_replaced_columns(rows: Sequence[Any], renamed: Mapping[str, str]) -> None:
    """Warn once for each column that takes the name of another column, which nothing reads then."""
    for new, name in renamed.items():
        if new == name or new in renamed.values():
            continue
        index = next((index for index, row in enumerate(rows) if isinstance(row, Mapping) and new in row), None)
        if index is not None:
            option = f"prompt_column={name!r}" if new == "prompt" else f"columns={{{new!r}: {name!r}}}"
            _warn_about_replaced_column(option, new, index)


@functools.cache  # once for all rows of a stream
def _warn_about_replaced_column(option: str, name: str, index: int) -> None:
    logger.warning("%s replaces the column %r that prompts[%d] has: drop one of them", option, name, index)


def add_system_message(source: Any, text: str, name: str) -> list[Any]:
    """Return chat messages with the system message ``text`` before ``source``, which is text or chat messages.

    ``name`` is what errors call ``source``.

    Raises:
        ValueError: the prompt already has a system message, or is token ids.
    """
    system = {"role": "system", "content": text}
    if isinstance(source, str):
        return [system, {"role": "user", "content": source}]
    messages = source.tolist() if hasattr(source, "tolist") else source
    if not isinstance(messages, list) or not messages or not isinstance(messages[0], Mapping):
        raise ValueError(f"{name} is not text or chat messages: system_prompt cannot be put before it")
    if any(isinstance(message, Mapping) and message.get("role") == "system" for message in messages):
        raise ValueError(f"{name} has a system message: leave out system_prompt={text[:40]!r}, or remove the message")
    return [system, *messages]


def refuse_unread_variables(variables: Mapping[str, Any], tokenizer: Any, sources: Sequence[Any]) -> None:
    """Raise ValueError for ``chat_template_kwargs`` that would be ignored.

    No template is applied if none of the prompts ``sources`` is chat messages.
    """
    if not variables:
        return
    if taken := [name for name in variables if name in RESERVED]:
        raise ValueError(f"chat_template_kwargs has {taken[0]!r}: that variable is set for each prompt")
    if not any(isinstance(source, list) and source and isinstance(source[0], Mapping) for source in sources):
        raise ValueError(
            f"chat_template_kwargs={dict(variables)!r} is ignored: no prompt is chat messages; set system_prompt or "
            "prompt_template, or write the prompts as messages"
        )
    template = str(getattr(tokenizer, "chat_template", None) or "")
    if template and (unread := [name for name in variables if name not in template]):
        raise ValueError(f"chat_template_kwargs has {unread[0]!r}, which the tokenizer's chat template does not read")
