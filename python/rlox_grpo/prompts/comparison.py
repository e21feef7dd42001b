"""Compare the prompts of a run with each other."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlox_grpo.types import Prompt

logger = logging.getLogger(__name__)


def refuse_different_forms(prompts: Sequence[Prompt], *, continue_final_message: bool) -> None:
    """Raise ValueError if prompts are of several forms (text, chat messages, token ids), or their last replies differ.

    A reward function would get completions of two forms. A last message with the role assistant is continued by the
    model. One text for all prompts is a prefill; texts that differ are probably reference replies, and are refused
    unless ``continue_final_message`` is set.
    """
    first_replies: dict[str, Prompt] = {}
    for prompt in prompts:
        forms = [_name_form(compared.source) for compared in (prompts[0], prompt)]
        if forms[0] != forms[1]:
            raise ValueError(
                f"{prompt.name} is {forms[1]} and {prompts[0].name} {forms[0]}: give all prompts in one form "
                "(system_prompt makes chat messages of texts)"
            )
        reply = _read_last_reply(prompt.source)
        if reply is None or continue_final_message:
            continue
        first_replies.setdefault(reply, prompt)
        if len(first_replies) > 1:
            before, first = next(iter(first_replies.items()))
            raise ValueError(
                f"{prompt.name} ends with the assistant's message {reply[:40]!r} and {first.name} with "
                f"{before[:40]!r}: the model would go on after them. If they are reference replies, take them out "
                "of the messages and into a column (row['answer'] = row['prompt'].pop()['content']); if they are "
                "begun replies, set continue_final_message=True"
            )


def warn_about_prompts(prompts: Sequence[Prompt], bos: int | None, *, are_rows: bool) -> None:
    """Warn of prompts that are probably a mistake: a second BOS, or all equal.

    ``bos`` is the tokenizer's BOS id. With ``are_rows``, an environment writes the prompts, and all may be equal.
    """
    doubled = [p.index for p in prompts if isinstance(p.source, str) and p.token_ids[:2].tolist() == [bos, bos]]
    if doubled and bos is not None:
        logger.warning(
            "prompts[%d] begins with two BOS tokens, the text's and the tokenizer's (%d of %d prompts): "
            "remove it from the text, or pass chat messages",
            doubled[0],
            len(doubled),
            len(prompts),
        )
    if are_rows or len(prompts) < 2:
        return
    first = _read_content(prompts[0])
    if all(_read_content(prompt) == first for prompt in prompts):
        logger.warning("all %d prompts are equal: prompts[0] and each other have the same tokens", len(prompts))


def warn_about_trained_prompts(held_out: Mapping[str, Sequence[Prompt]], trained: Sequence[Prompt]) -> None:
    """Warn of held-out prompts that are trained on, whose accuracy says nothing about other prompts.

    Rows of an environment, which writes their prompts, are equal if their columns are. Other prompts are equal if
    their tokens are, or their messages without the system message that the whole set or source has: a set or a source
    may have its own ``system_prompt``.

    Args:
        held_out: the prompts of each held-out set, by the set's name in the warning.
        trained: the prompts of the training. Only those that are held out too are kept.
    """
    contents = {name: [*_list_contents(prompts)] for name, prompts in held_out.items()}
    wanted = {content for listed in contents.values() for several in listed for content in several}
    by_content: dict[Any, Prompt] = {}
    for prompt, several in zip(trained, _list_contents(trained), strict=True) if wanted else ():
        for content in several:
            if content in wanted:
                by_content.setdefault(content, prompt)
    for name, prompts in held_out.items():
        shared = [
            (prompt, next(by_content[content] for content in several if content in by_content))
            for prompt, several in zip(prompts, contents[name], strict=True)
            if any(content in by_content for content in several)
        ]
        if shared:
            logger.warning(
                "%s: %d of %d prompts are trained on too, the first is %s, which is %s of the training: their accuracy "
                "does not measure other prompts",
                *(name, len(shared), len(prompts), shared[0][0].name, shared[0][1].name),
            )


def _list_contents(prompts: Sequence[Prompt]) -> Iterator[list[Any]]:
    """Yield for each prompt what makes it equal to prompts of another set: one of the values suffices."""
    systems: dict[str | None, set[str | None]] = {}  # by the source of a mixture
    for prompt in prompts:
        systems.setdefault(prompt.data_source, set()).add(_read_system(prompt.source))
    for prompt in prompts:
        contents: list[Any] = [content for content in [_read_content(prompt)] if content is not None]
        if len(prompt.token_ids) and prompt.source is not None and not prompt.pictures:
            source = prompt.source
            messages = [{"role": "user", "content": source}] if isinstance(source, str) else source
            has_common = len(systems[prompt.data_source]) == 1 and _read_system(source) is not None
            contents.append(("messages", repr(messages[1:] if has_common else messages)))
        yield contents


def _read_system(source: Any) -> str | None:
    """Return the content of the first message if it is the system's."""
    if not isinstance(source, list) or not source or not isinstance(source[0], Mapping):
        return None
    return repr(source[0].get("content")) if source[0].get("role") == "system" else None


def _read_content(prompt: Prompt) -> tuple[Any, ...] | None:
    """Return what makes prompts equal; None for a row of an environment with columns that are not plain values."""
    if len(prompt.token_ids):
        return prompt.token_ids.tobytes(), *(picture.digest for picture in prompt.pictures)
    columns = {name: value for name, value in prompt.columns.items() if name != "source"}  # that of a mixture
    if not all(_is_plain(value) for value in columns.values()):
        return None
    return repr(prompt.source), *sorted((name, repr(value)) for name, value in columns.items())


def _is_plain(value: Any) -> bool:
    """Whether a value, and all that it contains, is a list, a dict, text, a number or None: ``repr`` shows it whole."""
    if type(value) is dict:
        return all(_is_plain(key) and _is_plain(entry) for key, entry in value.items())
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, (str, int, float, bool, type(None)))


def _name_form(source: Any) -> str:
    return "token ids" if source is None else "text" if isinstance(source, str) else "chat messages"


def _read_last_reply(source: Any) -> str | None:
    """Return the content of the last message if it is the assistant's."""
    if not isinstance(source, list) or not source or not isinstance(source[-1], Mapping):
        return None
    return str(source[-1].get("content")) if source[-1].get("role") == "assistant" else None
