"""Check where completions end: stop strings that no text has, and the end of a turn in the chat template."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlox_grpo.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_REPLY = "the reply of a test"


def refuse_hidden_stops(
    stop: Sequence[str], tokenizer: PreTrainedTokenizerBase | None, end_ids: Collection[int]
) -> None:
    """Refuse a stop string with a special token, which the text of a completion leaves out.

    Args:
        stop: the stop strings.
        tokenizer: decodes the completions.
        end_ids: the ids that end a completion anyway.

    Raises:
        ConfigError: the string never ends a completion; the message has the id to set.
    """
    for index, text in _list_added(tokenizer).items() if stop else ():
        string = next((string for string in stop if text in string), None)
        if string is not None and index not in end_ids and not _decode(tokenizer, index):
            raise ConfigError(
                f"stop has {string!r}, and {text!r} is a special token, which the text of a completion does not show: "
                f"set generation_kwargs={{'stop_token_ids': [{index}]}} in its place"
            )


def warn_about_turn_end(
    tokenizer: PreTrainedTokenizerBase | None,
    variables: Mapping[str, Any],
    end_ids: Collection[int],
    stop: Sequence[str],
) -> None:
    """Warn if the chat template ends the assistant's turn with a token that does not end a completion.

    For example the tokenizer of a base model has the template of its instruct version, and its own end token.

    Args:
        tokenizer: has the chat template, or none.
        variables: variables for the template.
        end_ids: the ids that end a completion.
        stop: the strings that end a completion.
    """
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        return
    messages = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": _REPLY}]
    try:
        rendered = str(tokenizer.apply_chat_template(messages, tokenize=False, **variables))
    except Exception:  # noqa: BLE001  (of jinja2, or of the template: it may take other messages than these)
        return
    _, reply, end = rendered.rpartition(_REPLY)
    ids = tokenizer(end, add_special_tokens=False)["input_ids"] if reply else []
    added = _list_added(tokenizer)
    ends = [index for index in ids if index in added]
    if not ends or not set(ids).isdisjoint(end_ids) or any(string in end for string in stop):
        return
    logger.warning(
        "the chat template ends the assistant's turn with %r, which is no end token here: completions go on after it. "
        "Set tokenizer.eos_token to it, or generation_kwargs={'stop_token_ids': [%d]}",
        *(added[ends[0]], ends[0]),
    )


def _list_added(tokenizer: Any) -> dict[int, str]:
    """Return the texts of the tokens outside the vocabulary of the tokenizer's model by id: special ones and others."""
    return {int(index): str(token) for index, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}


def _decode(tokenizer: Any, index: int) -> str:
    return str(tokenizer.decode([index], skip_special_tokens=True))
