"""Chat messages: check and compare them, and make them from replies."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from rlox_grpo.environments import Reply, ToolCall
from rlox_grpo.environments.foreign import show
from rlox_grpo.rewards.copies import copy_value
from rlox_grpo.rollout.episodes.pictures import EpisodePictures

Message: TypeAlias = "Mapping[str, Any]"
MAX_PROMPT_CHARS = 2_000_000
"""Maximum characters of a message of the first prompt."""

MessageKey: TypeAlias = "tuple[str, tuple[str, ...], str | None, tuple[Any, ...], str | None]"
"""Key by which messages are compared: role, forms of the content, name or tool_call_id, tool calls, reasoning."""


def make_reply_message(content: str, reasoning: str | None = None, calls: Sequence[ToolCall] = ()) -> dict[str, Any]:
    """Make the message of a reply for chat templates."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": copy_value(dict(call.arguments))},
            }
            for call in calls
        ]
    return message


def make_message_key(message: Message) -> MessageKey:
    """Make the key by which a message is compared. Arguments of tool calls are compared as JSON values, not as text."""
    content = message.get("content")
    text = content if isinstance(content, str) else "" if content is None else json.dumps(content, default=str)
    calls = tuple(_make_call_key(call) for call in message.get("tool_calls") or ())
    reasoning = message.get("reasoning_content")
    role = str(message["role"])
    message_id = message.get("tool_call_id") if role == "tool" else message.get("name")
    return role, (text,), None if message_id is None else str(message_id), calls, reasoning


def cut_stop(content: str, stop: Sequence[str]) -> str:
    """Cut ``content`` before the first stop string, as OpenAI's API does."""
    ends = [position for text in stop if text and (position := content.find(text)) >= 0]
    return content[: min(ends)] if ends else content


def cut_reply(reply: Reply, stop: Sequence[str]) -> str:
    """Return the content of a reply without its stop string."""
    return cut_stop(reply.content, stop) if reply.finish_reason == "stop" else reply.content


def _make_call_key(call: Any) -> Any:
    function = call.get("function", call) if isinstance(call, Mapping) else {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return call.get("id"), function.get("name"), arguments
    return call.get("id"), function.get("name"), json.dumps(arguments, sort_keys=True, default=str)


def is_same_message(ours: MessageKey, theirs: MessageKey) -> bool:
    """Whether a message came back unchanged. The reasoning of a reply may be missing: many clients drop it."""
    reasoning = theirs[4] is None or theirs[4] == ours[4]
    return ours[0] == theirs[0] and theirs[1][0] in ours[1] and ours[2:4] == theirs[2:4] and reasoning


def list_messages(
    messages: str | Sequence[Message] | None, pictures: EpisodePictures | None = None
) -> list[dict[str, Any]]:
    """Return messages to the policy as a list of dicts, with their ``pictures`` read; a text is one user message.

    Without ``pictures``, every picture is an error.

    Raises:
        ValueError: a message without role or content, with a picture that cannot be read or with a lone surrogate, or
            an assistant message at the end.
    """
    if messages is None:
        return []
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if isinstance(messages, Mapping):
        messages = [messages]
    if not isinstance(messages, Iterable):
        raise ValueError(f"messages is {show(messages)}: expected a text, or a list of {{'role': …, 'content': …}}")
    listed = []
    pictures = pictures or EpisodePictures()
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise ValueError(f"messages[{index}] is {str(message)[:80]!r}: expected {{'role': …, 'content': …}}")
        message = pictures.read_message(message, f"messages[{index}]")
        content = message["content"]
        if isinstance(content, str):
            _refuse_surrogates(content, f"messages[{index}]")
        try:
            listed.append(copy_value(message))
        except TypeError as error:
            raise ValueError(f"messages[{index}]: {error}") from error
    if listed and listed[-1]["role"] == "assistant":
        raise ValueError("the last message has the role 'assistant': the policy writes that one")
    return listed


def bound_messages(messages: Sequence[Message], bound: Callable[[str, str | None], str]) -> list[dict[str, Any]]:
    """Return copies of ``messages``, with ``bound(text, tool)`` in place of each text of their contents.

    ``tool`` is the name of the tool whose result a message is, or None.
    """

    def bound_message(message: Message) -> dict[str, Any]:
        tool = message.get("name") if message["role"] == "tool" else None
        return {**message, "content": _bound_content(message["content"], lambda text: bound(text, tool))}

    return [*map(bound_message, messages)]


def refuse_long_prompt(text: str, tool: str | None = None) -> str:
    """Return ``text``, of any message; raise ValueError if it has more than :data:`MAX_PROMPT_CHARS` characters."""
    if len(text) > MAX_PROMPT_CHARS:
        raise ValueError(f"a message has {len(text)} characters: expected at most {MAX_PROMPT_CHARS}")
    return text


def refuse_late_tools(messages: Sequence[Message]) -> None:
    """Raise ValueError for tools that are passed after the first turn."""
    if messages:
        raise ValueError("tools can be given at the first turn only: templates list them at the beginning")


def _bound_content(content: Any, bound: Callable[[str], str]) -> Any:
    if isinstance(content, str):
        return bound(content)
    if not isinstance(content, list):
        return content
    return [
        {**entry, "text": bound(entry["text"])}
        if isinstance(entry, Mapping) and isinstance(entry.get("text"), str)
        else entry
        for entry in content
    ]


def read_stop(stop: str | Sequence[str]) -> tuple[str, ...]:
    """Return one or several stop strings as a tuple.

    Raises:
        ValueError: a stop string is empty, is not a text, or has a lone surrogate; the message contains its index.
    """
    several = (stop,) if isinstance(stop, str) else tuple(stop)
    for index, text in enumerate(several):
        if not isinstance(text, str) or not text:
            raise ValueError(f"stop[{index}] is {str(text)[:80]!r}: expected a text of at least one character")
        _refuse_surrogates(text, f"stop[{index}]")
    return several


def _refuse_surrogates(text: str, name: str) -> None:
    """Raise ValueError for a lone surrogate (half of a UTF-16 pair), which no tokenizer accepts."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} holds a lone surrogate at character {error.start}") from None
