"""Test on trial conversations whether a chat template rewrites history: whether new messages change earlier text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlox_grpo.rollout.episodes.template import Message, Template, TemplateError

Messages = list[dict[str, Any]]

_SYSTEM = {"role": "system", "content": "be brief"}
_ANSWER, _THOUGHT, _RESULT = "an answer", "a thought", "a result"


def find_rewrite(template: Template) -> str | None:
    """Describe what the template rewrites when a conversation continues; None if it rewrites nothing in any trial.

    Each trial has two replies. There are trials with and without a system message, with reasoning as ``<think>`` tags
    and as ``reasoning_content``, and, if the template has tools, with tool calls and their results.

    Raises:
        TemplateError: the template renders no conversation of several turns, or no tool result.
    """
    trials = [_list_trials()]
    if template.tools:
        trial = next(_list_tool_trials())
        if template.render(trial).count(_RESULT) <= template.render(trial[:2]).count(_RESULT):
            raise TemplateError("the chat template does not show a tool's result; it cannot be used with tools")
        trials.append(_list_tool_trials())
    for kind in trials:
        rendered, refused = 0, ""
        for conversation in kind:
            try:
                found = _find_rewrite_in(template, conversation)
            except TemplateError as error:
                refused = str(error)  # some templates have no system message
                continue
            rendered += 1
            if found is not None:
                return found
        if not rendered:
            raise TemplateError(refused)
    return None


def _find_rewrite_in(template: Template, conversation: Messages) -> str | None:
    places = [place for place, message in enumerate(conversation) if message["role"] == "assistant"]
    for place, following in zip(places, [*places[1:], len(conversation)], strict=True):
        history, reply = conversation[:place], conversation[place]
        new = conversation[place + 1 : following]
        prompt, later = template.render(history), template.render([*history, reply, *new])
        increment = template.render_increment(new)
        body = later[len(prompt) : len(later) - len(increment)]
        final = template.render([*history, reply], generation_prompt=False)
        if not later.startswith(prompt):
            return f"it changes the text before a reply {_describe_reply(reply)} once {_describe(new)} follows"
        if not later.endswith(increment):
            return f"its text for {_describe(new)} depends on more than the previous reply"
        if not final.startswith(prompt) or not final[len(prompt) :].startswith(body):
            return f"it changes a reply {_describe_reply(reply)} once {_describe(new)} follows"
        if _THOUGHT in str(reply["content"]) and _THOUGHT not in body:
            return f"it changes a reply {_describe_reply(reply)}"
    return None


def _list_trials() -> Iterator[Messages]:
    replies = [
        {"role": "assistant", "content": _ANSWER},
        {"role": "assistant", "content": f"<think>\n{_THOUGHT}\n</think>\n\n{_ANSWER}"},
        {"role": "assistant", "content": _ANSWER, "reasoning_content": _THOUGHT, "thinking": _THOUGHT},
    ]
    for head in ([], [_SYSTEM]):
        for reply in replies:
            yield [*head, *_exchange(reply), *_exchange(reply), {"role": "user", "content": "go on"}]


def _list_tool_trials() -> Iterator[Messages]:
    for count in (1, 2):
        calls = [
            {"id": f"call{place:05}", "type": "function", "function": {"name": "look_up", "arguments": {"x": "y"}}}
            for place in range(count)
        ]
        results = [
            {"role": "tool", "name": "look_up", "tool_call_id": call["id"], "content": _RESULT} for call in calls
        ]
        asked: Messages = [
            {"role": "user", "content": "a question"},
            {"role": "assistant", "content": "", "tool_calls": calls},
        ]
        for head in ([], [_SYSTEM]):
            yield [
                *head, *asked, *results, {"role": "assistant", "content": "", "tool_calls": calls}, *results,
                {"role": "assistant", "content": _ANSWER}, {"role": "user", "content": "go on"},
            ]  # fmt: skip


def _exchange(reply: dict[str, Any]) -> Messages:
    return [{"role": "user", "content": "a question"}, reply]


def _describe(messages: Messages) -> str:
    return "a tool's result" if messages and messages[0]["role"] == "tool" else "a user's message"


def _describe_reply(reply: Mapping[str, Any]) -> str:
    if reply.get("reasoning_content") or "<think>" in str(reply.get("content")):
        return "that holds reasoning"
    return "that calls a tool" if reply.get("tool_calls") else "in plain text"


def extends(template: Template, history: Sequence[Message], reply: Message, new: Sequence[Message], said: str) -> bool:
    r"""Whether rendering ``new`` messages leaves the text of ``history`` and ``reply`` unchanged.

    A template that drops earlier reasoning changes it. It shows the reasoning of the last reply only::

        prompt     <|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n
        sampled    <think>\nhm\n</think>\n\nyes<|im_end|>
        later      <|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n<|im_start|>user\n…

    A template may render a reply differently from how it was sampled, such as a tool call with other spaces. This
    counts as unchanged if later messages do not change that rendering.

    Args:
        template: the chat template.
        history: the messages before the reply.
        reply: the message of the reply.
        new: the messages after it.
        said: the sampled text of the reply, without its end token.

    Raises:
        TemplateError: the template refuses the conversation.
    """
    prompt, later = template.render(history), template.render([*history, reply, *new])
    try:
        increment = template.render_increment(new)
    except TemplateError:
        return False
    if not later.startswith(prompt) or not later.endswith(increment) or len(later) < len(prompt) + len(increment):
        return False
    body = later[len(prompt) : len(later) - len(increment)]
    if body == said:
        return True
    final = template.render([*history, reply], generation_prompt=False)
    if not final.startswith(prompt + body) or not increment.startswith(final[len(prompt + body) :].rstrip()):
        return False
    reasoning = str(reply.get("reasoning_content") or "").strip()
    return reasoning in body
