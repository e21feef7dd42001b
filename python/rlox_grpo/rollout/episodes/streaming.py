"""Stream a reply while it is being sampled: find the pieces that later tokens cannot change.

A piece is sent when its characters are complete and it cannot be the beginning of a tool call, of a stop string or of
``</think>``. The rest is sent when the reply is complete.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from rlox_grpo.rollout.episodes.parsing import FUNCTION, MARKS, THINK, THOUGHT, CallFormat, drop_tokens
from rlox_grpo.rollout.episodes.template import Template
from rlox_grpo.types import Int64Array

_REPLACEMENT = "\ufffd"
"""The character that stands for incomplete UTF-8 in decoded text."""
_THINK_TOKENS = 16
"""Number of last tokens of a prompt that are searched for ``<think>``."""
_LONG, _EVERY = 16, 16
"""After this many tokens without a complete character, as in a reply that is not text, decode only every 16 tokens."""


@dataclass(frozen=True)
class Delta:
    """A piece of a reply: text to append to content and reasoning. ``token_ids`` is set only if ``Form.is_raw``."""

    content: str = ""
    reasoning: str = ""
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Form:
    """How the text of a reply is parsed.

    Attributes:
        call_format: the format of tool calls; None: tool calls are not parsed.
        stop: strings that end the reply and are not shown.
        is_thinking: whether the prompt ends with ``<think>``.
        is_raw: the whole text is content, and each piece has its token ids.
    """

    call_format: CallFormat | None = None
    stop: tuple[str, ...] = ()
    is_thinking: bool = False
    is_raw: bool = False


def find_shown(text: str, form: Form) -> Delta:
    """Return the part of ``text`` that later tokens cannot change; ``text`` is the beginning of a reply.

    ``</think>`` ends the reasoning if the reply begins with ``<think>`` or its prompt ends with it. In other replies it
    is content, because the text before it has already been sent as content.

    Examples, without tools and with the stop string ``"END"``: the content ``"4 is the "`` is
    returned for the text ``"4 is the EN"``, and the reasoning ``"hm"`` for ``"<think>hm</th"``.
    """
    if form.is_raw:
        return Delta(_hold_content(text, form))
    bare = text.lstrip()
    if THINK.startswith(bare):  # such as "<thi", or nothing
        return Delta()
    opened = bare.startswith(THINK)
    if not opened and not form.is_thinking:
        return Delta(_hold_content(text, form))
    before, is_over, after = (bare[len(THINK) :] if opened else text).partition(THOUGHT)
    if not is_over:
        return Delta(reasoning=_hold_partial_mark(before, (THOUGHT,)).strip("\n"))
    return Delta(_hold_content(after.lstrip("\n"), form), before.strip("\n"))


def _hold_content(text: str, form: Form) -> str:
    marks = form.stop
    if form.call_format is not None:
        if text.lstrip()[:1] in ("", "{", "["):  # JSON may be a call without a tag
            return ""
        marks = (*marks, *MARKS[form.call_format], *((FUNCTION,) if form.call_format == "qwen_xml" else ()))
    ends = [position for mark in marks if mark and (position := text.find(mark)) >= 0]
    held = min([_hold_partial_mark(text, marks), *(text[:end] for end in ends)], key=len)
    return held if form.call_format is None else held.rstrip("\n")  # newlines before a call are not content


def _hold_partial_mark(text: str, marks: Sequence[str]) -> str:
    """Cut ``text`` before an end that may be the beginning of a mark."""
    longest = max(map(len, marks), default=1) - 1
    for start in range(max(0, len(text) - longest), len(text)):
        if any(mark.startswith(text[start:]) for mark in marks):
            return text[:start]
    return text


class ReplyPieces:
    """Decodes a reply token by token and sends its pieces.

    Attributes:
        content, reasoning: the text sent so far.
        is_shown: whether a piece was sent.
        is_sampled: set when the reply is complete, or its call is cancelled.
    """

    def __init__(
        self,
        template: Template,
        end_ids: Collection[int],
        form: Form,
        show: Callable[[Delta], None],
    ) -> None:
        """Begin an empty reply.

        Args:
            template: the chat template; its tokenizer decodes the tokens.
            end_ids: end tokens, which are not text.
            form: how the text is parsed.
            show: called with each piece.
        """
        self.content = self.reasoning = ""
        self.is_shown = False
        self.is_sampled = asyncio.Event()
        self._template, self._end_ids, self._form, self._show = template, end_ids, form, show
        marks = () if form.call_format is None else MARKS[form.call_format]
        self._special = template.special_tokens if set(template.special_tokens).intersection(marks) else []
        self._ids: list[int] = []
        self._unseen: list[int] = []  # token ids of a raw reply that were not sent yet
        self._num_added = 0
        self._text = ""
        self._from = self._done = 0  # start of the tokens to decode, and number of the tokens in _text

    def add(self, token_ids: Sequence[int]) -> None:
        """Add sampled tokens, and send the text that has become final."""
        self._num_added += len(token_ids)
        if self._form.is_raw:
            self._unseen += token_ids
        delta = self._find_new(token_ids)
        self._send(drop_tokens(delta.content, self._special), delta.reasoning)

    def _find_new(self, token_ids: Sequence[int]) -> Delta:
        """Return the text that can be sent with these tokens; empty if no character became complete."""
        self._ids += [token for token in token_ids if token not in self._end_ids]
        tail = len(self._ids) - self._done
        if not tail or (tail > _LONG and tail % _EVERY):
            return Delta()
        # A tokenizer may strip the space before a first token, so new tokens are decoded together with earlier ones.
        before, now = (
            self._template.decode(ids, with_special=bool(self._special))
            for ids in (self._ids[self._from : self._done], self._ids[self._from :])
        )
        if len(now) <= len(before) or now.endswith(_REPLACEMENT):
            return Delta()
        self._text += now[len(before) :]
        self._from, self._done = self._done, len(self._ids)
        return find_shown(self._text, self._form)

    def finish(self, content: str, reasoning: str | None, token_ids: Sequence[int] = ()) -> None:
        """Send the rest of a complete reply: its content and reasoning, and the token ids of a raw reply.

        Nothing is sent if ``content`` does not begin with the content sent so far. The two differ if a reply has
        ``</think>`` without ``<think>``: the text before ``</think>`` was sent as content, but is reasoning.
        """
        self._unseen += token_ids[self._num_added :]
        if content.startswith(self.content):
            self._send(content, reasoning or "")

    def _send(self, content: str, reasoning: str) -> None:
        """Send the new part of content and reasoning, each if it extends the text sent so far."""
        more = content[len(self.content) :] if content.startswith(self.content) else ""
        thoughts = reasoning[len(self.reasoning) :] if reasoning.startswith(self.reasoning) else ""
        self.content, self.reasoning = self.content + more, self.reasoning + thoughts
        if more or thoughts or self._unseen:
            self.is_shown = True
            self._show(Delta(more, thoughts, tuple(self._unseen)))
            self._unseen = []


def begin_pieces(
    template: Template,
    context: Int64Array,
    end_ids: Collection[int],
    stop: tuple[str, ...],
    show: Callable[[Delta], None],
    with_tools: bool,
    is_raw: bool,
) -> ReplyPieces:
    """Begin to stream the reply to ``context``, ``int64 [L]``; see :class:`ReplyPieces` and :class:`Form`."""
    if is_raw:
        return ReplyPieces(template, end_ids, Form(stop=stop, is_raw=True), show)
    before = template.decode(context[-_THINK_TOKENS:], with_special=True)
    form = Form(template.call_format if with_tools else None, stop, before.rstrip().endswith(THINK))
    return ReplyPieces(template, end_ids, form, show)
