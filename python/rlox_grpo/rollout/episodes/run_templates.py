"""The chat templates of a run, one for each list of tools, tested once for rewrites and the format of calls."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlox_grpo.config.records.episodes import EpisodeConfig
from rlox_grpo.config.records.prompts import PromptConfig
from rlox_grpo.environments import ToolCall
from rlox_grpo.errors import ConfigError
from rlox_grpo.prompts.rows import refuse_unread_variables
from rlox_grpo.rollout.episodes.messages import make_reply_message
from rlox_grpo.rollout.episodes.template import Template, TemplateError, find_call_format

logger = logging.getLogger(__name__)

_MAX_TEMPLATES = 256
"""Maximum number of different tool lists in a run."""

Schemas = Sequence[Mapping[str, Any]]
Messages = list[dict[str, Any]]

_SYSTEM = {"role": "system", "content": "be brief"}
_ANSWER, _THOUGHT, _RESULT = "an answer", "a thought", "a result"


class RunTemplates:
    """Creates and stores the templates for lists of tools."""

    def __init__(self, tokenizer: Any, config: EpisodeConfig, prompts: PromptConfig) -> None:
        """Check the tokenizer and the variables of its chat template.

        Raises:
            ConfigError: there is no tokenizer, or its template does not read a variable of ``chat_template_kwargs``.
        """
        if tokenizer is None:
            raise ConfigError("environment= and tools= need a tokenizer with a chat_template")
        try:
            refuse_unread_variables(prompts.chat_template_kwargs, tokenizer, [[{"role": "user"}]])
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self._tokenizer = tokenizer
        self._config = config
        self._variables = prompts.chat_template_kwargs
        self._templates: dict[str, Template] = {}

    def give(self, schemas: Schemas) -> Template:
        """Return the template for JSON schemas of tools.

        Raises:
            ConfigError: the template cannot be used, or the run has too many different lists of tools.
        """
        name = json.dumps(schemas)
        if name not in self._templates:
            if len(self._templates) >= _MAX_TEMPLATES:
                raise ConfigError(f"the environment gave {_MAX_TEMPLATES} lists of tools: give the same ones each time")
            try:
                template = Template(self._tokenizer, schemas, self._variables)
                rewrite = find_rewrite(template)
                self._choose_call_format(template)
            except ValueError as error:
                raise ConfigError(str(error)) from error
            if rewrite is not None and self._config.history == "template":
                template.rewrites = True
                self._warn_about_rewrites(rewrite)
            self._templates[name] = template
        return self._templates[name]

    def _warn_about_rewrites(self, rewrite: str) -> None:
        if any(template.rewrites for template in self._templates.values()):
            return
        logger.warning(
            "the chat template rewrites history: %s. Each reply to a rewritten history opens a branch, a further row "
            "of its episode; the update forwards its tokens from the first changed one on (episode/branches counts "
            "branches). Set history='keep' to show the policy its earlier replies as it sampled them, in one row",
            rewrite,
        )

    def _choose_call_format(self, template: Template) -> None:
        """Set the format of tool calls: the option's format, or the format that the template writes."""
        asked = self._config.call_format
        chosen = find_call_format(template) if asked == "auto" and template.tools else asked
        if chosen is not None and chosen != "auto":
            template.call_format = chosen
        parsed = f"in the format call_format={template.call_format!r}"
        if chosen is None:
            parsed = "in Hermes' format, <tool_call>{…}</tool_call>, and as JSON"
        if not template.shows_tools():
            logger.warning(
                "the chat template does not show the tools to the policy: describe the tools, and how to call them, in "
                "a system message or in the prompts. Replies are parsed %s (option call_format)",
                parsed,
            )
        elif chosen is None:
            logger.warning(
                "the chat template writes tool calls in an unknown format: replies are parsed %s; set call_format to "
                "choose another",
                parsed,
            )


def find_rewrite(template: Template) -> str | None:
    """Describe what the template rewrites when a conversation continues; None if it rewrites nothing in any trial.

    Each trial has two replies. There are trials with and without a system message, with reasoning as ``<think>`` tags
    and as ``reasoning_content``. If the template has tools, there are trials with tool calls and their results. In
    some of them the reply has text or reasoning too.

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
                rewrite = _find_rewrite_in(template, conversation)
            except TemplateError as error:
                refused = str(error)  # some templates have no system message
                continue
            rendered += 1
            if rewrite is not None:
                return rewrite
        if not rendered:
            raise TemplateError(refused)
    return None


def _find_rewrite_in(template: Template, conversation: Messages) -> str | None:
    reply_indices = [index for index, message in enumerate(conversation) if message["role"] == "assistant"]
    for index, following in zip(reply_indices, [*reply_indices[1:], len(conversation)], strict=True):
        history, reply = conversation[:index], conversation[index]
        new = conversation[index + 1 : following]
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
        make_reply_message(_ANSWER),
        make_reply_message(f"<think>\n{_THOUGHT}\n</think>\n\n{_ANSWER}"),
        {**make_reply_message(_ANSWER, _THOUGHT), "thinking": _THOUGHT},
    ]
    for head in ([], [_SYSTEM]):
        for reply in replies:
            yield [*head, *_exchange(reply), *_exchange(reply), {"role": "user", "content": "go on"}]


def _list_tool_trials() -> Iterator[Messages]:
    for count in (1, 2):
        calls = [ToolCall("look_up", {"x": "y"}, f"call{index:05}") for index in range(count)]
        results = [{"role": "tool", "name": call.name, "tool_call_id": call.id, "content": _RESULT} for call in calls]
        for content, reasoning in (("", None), (_ANSWER, None), ("", _THOUGHT)):
            reply = make_reply_message(content, reasoning, calls)
            for head in ([], [_SYSTEM]):
                yield [
                    *head, *_exchange(reply), *results, reply, *results, make_reply_message(_ANSWER),
                    {"role": "user", "content": "go on"},
                ]  # fmt: skip


def _exchange(reply: dict[str, Any]) -> Messages:
    return [{"role": "user", "content": "a question"}, reply]


def _describe(messages: Messages) -> str:
    return "a tool's result" if messages and messages[0]["role"] == "tool" else "a user's message"


def _describe_reply(reply: Mapping[str, Any]) -> str:
    if reply.get("reasoning_content") or "<think>" in str(reply.get("content")):
        return "that holds reasoning"
    return "that calls a tool" if reply.get("tool_calls") else "in plain text"
