"""Read the column ``demonstration``: a reply to the prompt that the policy did not write, as token ids."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np

from rlox_grpo.prompts.chat_entries import needs_entries, wrap_texts
from rlox_grpo.types import Int64Array, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

COLUMN = "demonstration"

_FORMS = "expected text, a chat message of the role assistant, or token ids; None for a row without one"


def read_demonstrations(
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    chat_template_kwargs: Mapping[str, Any],
    end_ids: Sequence[int],
    stop: Sequence[str],
    max_new_tokens: int,
    vocab_size: int | None,
    needs_column: bool = True,
) -> list[Prompt]:
    """Return the prompts with the demonstrations of the column ``demonstration``; None: no demonstration.

    - Text is what the policy would write after the prompt: its tokens and one end token follow those of the prompt.
      Text that ends with a stop string gets no end token.
    - A chat message ``{"role": "assistant", …}``, alone or in a list, is rendered by the chat template after the
      prompt's messages, up to its end token.
    - Token ids stay as they are; the last one should be an end token.

    Args:
        prompts: loaded prompts.
        tokenizer: the policy's tokenizer; not needed for token ids.
        chat_template_kwargs: variables for the chat template.
        end_ids: ids that end a completion; the tokenizer's own end token is used if it is one of them, otherwise the
            first.
        stop: stop strings, which end a completion too.
        max_new_tokens: maximum number of tokens of a demonstration, with its end token.
        vocab_size: number of the model's token ids; None: unknown.
        needs_column: whether each row needs the column. Without it, such as in a source of a mixture, a row has no
            demonstration.

    Raises:
        ValueError: a row has no such column, or a demonstration is empty, too long, of unknown ids, or cannot be
            rendered; the message names the row.
        TypeError: a value of another type.
    """
    read = []
    for prompt in prompts:
        if COLUMN not in prompt.columns and needs_column:
            has = ", ".join(map(repr, prompt.columns)) or "no other column"
            raise ValueError(
                f"demo_loss is set and {prompt.name} has no column {COLUMN!r}; it has {has}. Name the column by "
                f"columns={{{COLUMN!r}: …}}, with None in rows without a demonstration, or leave demo_loss out"
            )
        value, where = prompt.columns.get(COLUMN), f"{prompt.name}, {COLUMN}"
        if prompt.pictures and value is not None:
            raise ValueError(f"{where}: demonstrations of prompts with pictures are not supported; set it to None")
        ids = _read(value, where, prompt, tokenizer, chat_template_kwargs, end_ids, tuple(stop))
        if ids is not None:
            _check(ids, where, end_ids, max_new_tokens, vocab_size)
        read.append(replace(prompt, demonstration=ids))
    return read


def refuse_no_demonstration(prompts: Sequence[Prompt]) -> None:
    """Raise ValueError if none of the prompts has a demonstration."""
    if all(prompt.demonstration is None for prompt in prompts):
        raise ValueError(
            f"demo_loss is set and none of {len(prompts)} rows has a {COLUMN}: fill the column {COLUMN!r}, or leave "
            "demo_loss out"
        )


def warn_about_unused_demonstrations(prompts: Sequence[Prompt]) -> None:
    """Log a warning if prompts of a run without ``demo_loss`` have a column ``demonstration``."""
    if any(COLUMN in prompt.columns for prompt in prompts):
        logger.warning(
            "the rows have a column %r, which only reward functions receive: demo_loss='ce' or 'luffy' trains on it",
            COLUMN,
        )


def _read(
    value: Any,
    where: str,
    prompt: Prompt,
    tokenizer: PreTrainedTokenizerBase | None,
    variables: Mapping[str, Any],
    end_ids: Sequence[int],
    stop: tuple[str, ...],
) -> Int64Array | None:
    value = value.tolist() if hasattr(value, "tolist") else value
    if value is None:
        return None
    if isinstance(value, Mapping):
        value = [value]
    if isinstance(value, (list, tuple)) and value and all(map(_is_whole, value)):
        try:
            return np.asarray(value, np.int64)
        except OverflowError:
            raise ValueError(f"{where} has the token id {max(value, key=abs)}: it is no int64") from None
    if not isinstance(value, str) and not (isinstance(value, list) and all(isinstance(m, Mapping) for m in value)):
        inner = f" of {type(value[0]).__name__}" if isinstance(value, (list, tuple)) and value else ""
        raise TypeError(f"{where} is {type(value).__name__}{inner}: {_FORMS}")
    if not value:
        raise ValueError(f"{where} is empty: {_FORMS}")
    if tokenizer is None:
        raise ValueError(f"{where} is not token ids and there is no tokenizer: pass tokenizer=, or token ids")
    text = value if isinstance(value, str) else _render(value, where, prompt, tokenizer, variables)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} holds the lone surrogate {text[error.start]!r} at character {error.start}") from None
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if isinstance(value, str):
        if ids and (ids[-1] in end_ids or text.endswith(stop)):
            return np.asarray(ids, np.int64)
        if not end_ids:
            raise ValueError(f"{where} is text and the model has no end token: give token ids, with the end")
        end: Any = tokenizer.eos_token_id
        return np.asarray([*ids, end if end in end_ids else end_ids[0]], np.int64)
    # A template writes a line break after the end token, which the policy never samples.
    ends = [offset for offset, token in enumerate(ids) if token in end_ids]
    if not ends:
        raise ValueError(
            f"{where}: the chat template writes no end token of the model after the message: give text or token ids"
        )
    return np.asarray(ids[: ends[-1] + 1], np.int64)


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _render(
    messages: Sequence[Any],
    where: str,
    prompt: Prompt,
    tokenizer: PreTrainedTokenizerBase,
    variables: Mapping[str, Any],
) -> str:
    """Return what the chat template writes for an assistant message after the text of the prompt."""
    roles = [message.get("role") for message in messages]
    if roles != ["assistant"]:
        raise ValueError(
            f"{where} has messages of the roles {roles}: expected one of the role 'assistant'; the messages before it "
            "belong into the prompt"
        )
    if not isinstance(prompt.source, list) or prompt.text is None:
        raise ValueError(f"{where} is a chat message and the prompt is not: write both as messages or both as text")
    if prompt.source[-1].get("role") == "assistant":
        raise ValueError(
            f"{where} is a chat message and the prompt ends with one of the assistant, which it continues: write the "
            "demonstration as text"
        )
    if messages[0].get("content") is None and not messages[0].get("tool_calls"):
        raise ValueError(f"{where} has a message without 'content'")
    shown = [*prompt.source, *messages]
    if needs_entries(tokenizer):
        shown = wrap_texts(shown)
    try:
        whole: Any = tokenizer.apply_chat_template(shown, tokenize=False, **variables)
    except Exception as error:  # jinja2's errors, and those that a template raises
        raise ValueError(f"{where}: the tokenizer's chat template refuses it: {error}") from error
    if not str(whole).startswith(prompt.text):
        raise ValueError(
            f"{where}: the chat template does not write the message right after the prompt, for example because it "
            "drops the reasoning or opens it in the prompt: write the demonstration as text, as the policy would"
        )
    return str(whole)[len(prompt.text) :]


def _check(ids: Int64Array, where: str, end_ids: Sequence[int], max_new_tokens: int, vocab_size: int | None) -> None:
    ends = np.flatnonzero(np.isin(ids[:-1], np.asarray(end_ids, np.int64)))
    if len(ends):
        raise ValueError(
            f"{where} has the end token {ids[ends[0]]} at position {ends[0]} of {len(ids)}: the policy stops there; "
            "cut the demonstration after it"
        )
    if len(ids) > max_new_tokens:
        raise ValueError(
            f"{where} has {len(ids)} tokens with its end, more than max_new_tokens={max_new_tokens}: raise it, shorten "
            "the demonstration, or set it to None"
        )
    beyond = (ids < 0) | (ids >= (np.inf if vocab_size is None else vocab_size))
    if beyond.any():
        at = int(beyond.argmax())
        raise ValueError(f"{where} has the token id {ids[at]} at position {at}, outside the model's vocabulary")
