"""Contents of chat messages as lists of entries, for chat templates that read nothing else (SmolVLM's)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_PROBE = "zqprobe"


def needs_entries(tokenizer: Any, template: str | None = None) -> bool:
    """Whether a chat template leaves out contents that are text and writes them as entries ``{"type": "text"}``.

    ``template`` is used instead of the tokenizer's.
    """
    options = {} if template is None else {"chat_template": template}

    def writes(messages: Sequence[Any]) -> bool:
        try:
            return _PROBE in str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
        except Exception:  # noqa: BLE001  jinja2's errors, and those that a template raises
            return False

    message = {"role": "user", "content": _PROBE}
    return not writes([message]) and writes(wrap_texts([message]))


def wrap_texts(messages: Sequence[Any]) -> list[Any]:
    """Return messages whose contents are entries: a text becomes one of them."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message.get("content"), str)
        else message
        for message in messages
    ]
