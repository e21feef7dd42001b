r"""Render a conversation turn by turn: first the whole prompt, later only the new messages.

The tokens of a reply are used as they were sampled. New messages are rendered after a placeholder reply in a short
synthetic conversation. The text after the placeholder is the increment. The increment begins with the end of the
reply's turn and the separator, and ends with the next generation prompt::

    rendered   <|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nPLACEHOLDER<|im_end|>\n<|im_start|>user\n…
    increment                                                                   <|im_end|>\n<|im_start|>user\n…
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from rlox_grpo.environments import ToolCall
from rlox_grpo.prompts.load import refuse_unknown_role
from rlox_grpo.rollout.episodes.messages import Message, make_reply_message
from rlox_grpo.rollout.episodes.parsing import MARKS, CallFormat, parse_reply
from rlox_grpo.types import Int64Array

_PLACEHOLDER = "rloxPlaceholderReply"


class TemplateError(ValueError):
    """The chat template cannot render a conversation."""


class Template:
    """A tokenizer's chat template.

    Attributes:
        tokenizer: the model's tokenizer.
        tools: JSON schemas of the tools in the conversation, or None.
        special_tokens: texts of the tokenizer's special tokens.
        call_format: the format in which tool calls are parsed.
        rewrites: whether the template may rewrite history. If so, :meth:`extends` checks each turn.
    """

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Test whether the template takes the content of messages as text or as a list of parts.

        Raises:
            TemplateError: there is no chat template, or it does not show the text of a user's message.
        """
        if getattr(tokenizer, "chat_template", None) is None:
            raise TemplateError("an environment needs a tokenizer with a chat_template: set tokenizer.chat_template")
        self.tokenizer = tokenizer
        self.tools = [*tools] if tools else None
        self.special_tokens = [str(token) for token in getattr(tokenizer, "all_special_tokens", ()) if token]
        self.call_format: CallFormat = "hermes"
        self.rewrites = False
        self._variables = dict(variables)
        self._content_is_list = False
        question = [{"role": "user", "content": _PLACEHOLDER}]
        try:
            takes_text = _PLACEHOLDER in self.render(question)
        except TemplateError:
            takes_text = False
        if not takes_text:
            self._content_is_list = True  # templates of vision models take only a list of parts
            if _PLACEHOLDER not in self.render(question):
                raise TemplateError("the chat template does not show the text of a user's message")

    def render(self, messages: Sequence[Message], *, generation_prompt: bool = True) -> str:
        """Render ``messages`` as text.

        Raises:
            TemplateError: the template refuses the messages; the error has its reason.
            ValueError: a role that the template does not contain; many templates leave such a message out in silence.
        """
        for message in messages:
            refuse_unknown_role(message["role"], str(self.tokenizer.chat_template), "a message of the conversation")
        shown = [dict(message) for message in messages]
        for message in shown:
            if self._content_is_list and isinstance(message.get("content"), str):
                message["content"] = [{"type": "text", "text": message["content"]}]
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    shown, tools=self.tools, tokenize=False, add_generation_prompt=generation_prompt, **self._variables
                )
            )
        except Exception as error:  # jinja2's errors, and errors that a template raises
            raise TemplateError(f"the chat template refuses the conversation: {error}") from error

    def shows_tools(self) -> bool:
        """Whether a prompt contains the name of each tool; True without tools.

        A template that was made for plain chats takes ``tools`` and ignores them, without an error.
        """
        names = [str(schema.get("function", schema).get("name", "")) for schema in self.tools or ()]
        question = {"role": "user", "content": "q"}
        for messages in ([question], [{"role": "system", "content": "s"}, question]):
            try:
                prompt = self.render(messages)
            except TemplateError:  # some templates have no system message, others need one
                continue
            if all(name in prompt for name in names):
                return True
        return False

    def encode(self, text: str) -> Int64Array:
        """Return the token ids of rendered text, which already has its special tokens.

        Raises:
            TemplateError: the text has a lone surrogate, which may come from any field of a message.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TemplateError(f"the rendered conversation holds a lone surrogate: {error.reason}") from None
        return np.asarray(self.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64)

    def decode(self, ids: Int64Array | Sequence[int], *, with_special: bool) -> str:
        """Return the text of token ids, with or without special tokens."""
        options = {"skip_special_tokens": not with_special, "clean_up_tokenization_spaces": False}
        return str(self.tokenizer.decode([int(token) for token in ids], **options))

    def render_increment(self, messages: Sequence[Message]) -> str:
        """Render the text between two replies: the end of the turn, ``messages`` and the generation prompt.

        Raises:
            TemplateError: the template does not render ``messages`` after a reply.
        """
        refused: TemplateError | None = None
        for context in _list_contexts(messages):
            try:
                final = self.render(context, generation_prompt=False)
                later = self.render([*context, *messages])
            except TemplateError as error:
                refused = error
                continue
            tail = later.rpartition(_PLACEHOLDER)
            if not tail[1]:
                continue
            if "tool_calls" not in context[-1]:
                return tail[2]
            call = self._cut_end(final.rpartition(_PLACEHOLDER)[2])
            if not tail[2].startswith(call):
                raise TemplateError("the chat template changes a tool call once its result follows")
            return tail[2].removeprefix(call)
        raise refused or TemplateError("the chat template does not show a reply that other messages follow")

    def extend(self, messages: Sequence[Message], ended_by: int | None) -> Int64Array:
        """Return the token ids of :meth:`render_increment`, without the end of the turn if the policy sampled it.

        Args:
            messages: the new messages.
            ended_by: the end token of the reply. None: the reply has no end token, so the increment includes the end
                of the turn.
        """
        ids = self.encode(self.render_increment(messages))
        if ended_by is None:
            return ids
        if len(ids) and ids[0] == ended_by:
            return ids[1:]
        end = self.encode(self._render_end())  # some templates write more than the end token: ``</response><eos>``
        end_positions = np.flatnonzero(end == ended_by)
        if len(end_positions) and np.array_equal(ids[: end_positions[0] + 1], end[: end_positions[0] + 1]):
            return ids[end_positions[0] + 1 :]
        return ids

    def extends(self, history: Sequence[Message], reply: Message, new: Sequence[Message], said: str) -> bool:
        r"""Whether rendering ``new`` messages leaves the text of ``history`` and ``reply`` unchanged.

        A template that drops earlier reasoning changes this text, because it shows only the reasoning of the last
        reply::

            prompt     <|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n
            sampled    <think>\nhm\n</think>\n\nyes<|im_end|>
            later      <|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n<|im_start|>user\n…

        A template may render a reply differently from how it was sampled, such as a tool call with other spaces. The
        text counts as unchanged if later messages do not change that rendering.

        Args:
            history: the messages before the reply.
            reply: the message of the reply.
            new: the messages after the reply.
            said: the sampled text of the reply, without its end token.

        Raises:
            TemplateError: the template refuses the conversation.
        """
        prompt, later = self.render(history), self.render([*history, reply, *new])
        try:
            increment = self.render_increment(new)
        except TemplateError:
            return False
        if not later.startswith(prompt) or not later.endswith(increment) or len(later) < len(prompt) + len(increment):
            return False
        body = later[len(prompt) : len(later) - len(increment)]
        if body == said:
            return True
        final = self.render([*history, reply], generation_prompt=False)
        if not final.startswith(prompt) or body != self._cut_end(final[len(prompt) :]):
            return False
        reasoning = str(reply.get("reasoning_content") or "").strip()
        return reasoning in body

    def _cut_end(self, said: str) -> str:
        """Cut off the end of the turn: ``"}}</tool_call><|im_end|>`` becomes ``"}}</tool_call>``."""
        end = self._render_end()
        if end and said.endswith(end):
            return said.removesuffix(end)
        ends = [position for token in self.special_tokens if token in end and (position := said.find(token)) >= 0]
        if ends:
            return said[: min(ends)]
        # A turn with a tool call may end with a special token of its own, such as <|call|>, or with none.
        marks = {mark for form in MARKS.values() for mark in form}
        end_tokens = [token for token in self.special_tokens if token not in marks and said.rstrip().endswith(token)]
        return said.rstrip().removesuffix(max(end_tokens, key=len)) if end_tokens else said

    def _render_end(self) -> str:
        """Render the text after the last reply of a conversation."""
        plain = [{"role": "user", "content": "q"}, make_reply_message(_PLACEHOLDER)]
        return self.render(plain, generation_prompt=False).rpartition(_PLACEHOLDER)[2]


def _list_contexts(messages: Sequence[Message]) -> list[list[dict[str, Any]]]:
    """Synthetic conversations before ``messages``; the last message of each contains the placeholder."""
    question = {"role": "user", "content": "q"}
    plain = [question, make_reply_message(_PLACEHOLDER)]
    calls = [
        ToolCall(str(message.get("name") or "tool"), {"x": _PLACEHOLDER}, str(message.get("tool_call_id") or _CALL.id))
        for message in messages
        if message.get("role") == "tool"
    ]
    return [[question, make_reply_message("", calls=calls)], plain] if calls else [plain]


_CALL = ToolCall("look_up", {"word": "a word"}, "call00000")


def find_call_format(template: Template) -> CallFormat | None:
    """Find the format whose parser can read a tool call of ``template``; None if there is none."""
    question, reply = {"role": "user", "content": "q"}, make_reply_message("", calls=[_CALL])
    try:
        prompt = template.render([question])
        whole = template.render([question, reply], generation_prompt=False)
    except TemplateError:
        return None
    if not whole.startswith(prompt):
        prompt = template.render([question], generation_prompt=False)
    said = whole[len(prompt) :]
    # Formats with a mark in the text are tried first.
    candidates: list[CallFormat] = [form for form, marks in MARKS.items() if any(mark in said for mark in marks)]
    candidates.append("llama3" if '"parameters"' in said else "json")
    for form in candidates:
        parsed = parse_reply(_cut_end(said, template, form), with_tools=True, call_format=form)
        if [(name, dict(arguments)) for name, arguments in parsed.calls] == [(_CALL.name, _CALL.arguments)]:
            return form
    return None


def _cut_end(said: str, template: Template, form: CallFormat) -> str:
    """Cut the text before the first special token that is not a mark of the format."""
    special = [token for token in template.special_tokens if token not in MARKS[form]]
    ends = [position for token in special if (position := said.find(token)) > 0]
    return said[: min(ends)] if ends else said
