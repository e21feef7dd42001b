"""One conversation of an episode: its messages, and the exact tokens that the policy got and sampled.

An episode has one conversation, and one more for each branch. The :class:`Span` objects before the beginning of a
branch are those of the conversation that it branches off, so a shared reply is recognised by identity::

    conversation   prompt | reply 1 | message 2 | reply 2
    branch         prompt | reply 1 | message 3 | reply 3      the same Span object for reply 1
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import numpy as np

from rlox_grpo.batch.sampling_mask import join_masks
from rlox_grpo.environments import Reply, ToolCall
from rlox_grpo.rewards.copies import copy_value
from rlox_grpo.rollout.engines.turns import SampledTurn
from rlox_grpo.rollout.episodes.messages import (
    Message,
    MessageKey,
    cut_stop,
    is_same_message,
    make_message_key,
    make_reply_message,
)
from rlox_grpo.rollout.episodes.parsing import MARKS, drop_tokens, parse_reply
from rlox_grpo.rollout.episodes.pictures import EpisodePictures
from rlox_grpo.rollout.episodes.template import Template
from rlox_grpo.types import FinishReason, Float32Array, Int32Array, Int64Array, Picture, SamplingMask


@dataclass(frozen=True, eq=False)
class ChatTokens:
    """The tokens of a conversation so far.

    Attributes:
        prompt_ids: ``int64 [P]``, the first prompt.
        token_ids: ``int64 [T]``, all later tokens.
        log_probs: ``float32 [T]``, 0.0 on tokens that the policy did not sample.
        sampled: ``bool [T]``, True on tokens that the policy sampled.
        turns: offsets in ``token_ids`` at which the replies begin.
        truncated: whether the last reply has no end token or stop string.
        versions: the policy version of each of ``turns``, with partial rollouts; otherwise empty.
        sampling_mask: the ids from which each token was drawn; None: all, or the engine does not say.
        prompt_pictures: the pictures of the first prompt, in order.
        pictures: the pictures of ``token_ids``, in order.
    """

    prompt_ids: Int64Array
    token_ids: Int64Array
    log_probs: Float32Array
    sampled: np.ndarray[Any, np.dtype[np.bool_]]
    turns: tuple[int, ...]
    truncated: bool
    versions: tuple[int, ...] = ()
    sampling_mask: SamplingMask[Int32Array] | None = None
    prompt_pictures: tuple[Picture, ...] = ()
    pictures: tuple[Picture, ...] = ()


@dataclass(frozen=True, eq=False)
class Span:
    """A reply, or the tokens between two replies with their pictures: ``int64 [n]`` and ``float32 [n]``."""

    token_ids: Int64Array
    log_probs: Float32Array
    sampled: bool
    policy_version: int | None = None
    sampling_mask: SamplingMask[Int32Array] | None = None
    pictures: tuple[Picture, ...] = ()


@dataclass(frozen=True)
class Mark:
    """The state of a conversation after a reply, from which it can be continued or branched off.

    Attributes:
        messages, spans: number of messages and spans, including the reply.
        ended_by: the end token of the reply; None: the reply ended with a stop string or was truncated.
        truncated: whether the reply has no end token or stop string.
        open_span: index of the first span of the reply, which has several if a truncated reply was continued.
        calls: number of tool calls so far, from which their ids are made.
    """

    messages: int
    spans: int
    ended_by: int | None
    truncated: bool
    open_span: int
    calls: int


class Conversation:
    """Messages, a first prompt, and the spans of tokens after it.

    Attributes:
        template: the chat template.
        branch: number of the branch, see :class:`rlox_grpo.rollout.engines.turns.TurnRequest`; −1 before it is
            numbered.
        messages: the messages so far.
        prompt_messages: number of messages in the first prompt.
        busy: whether a reply is being sampled.
        is_cancelled: whether the call of the last reply was cancelled. The engine may still sample it, so later calls
            branch off instead of continuing here.
        rewrites: the conversation whose rewritten or summarised history is the first prompt of this one, or None.
        earlier: the messages before the last compaction, including its request and its summary.
        num_repeated: number of the first messages that repeat or replace those of ``earlier``.
    """

    def __init__(
        self,
        template: Template,
        end_ids: Collection[int],
        pictures: EpisodePictures,
        branch: int = 0,
        rewrites: Conversation | None = None,
    ) -> None:
        self.template, self.branch, self.rewrites = template, branch, rewrites
        self.messages: list[dict[str, Any]] = []
        self.earlier: list[dict[str, Any]] = []
        self.num_repeated = 0
        self.prompt_messages = 0
        self.busy = self.is_cancelled = False
        self._end_ids, self._read_pictures = end_ids, pictures
        self._prompt_pictures: tuple[Picture, ...] = ()
        self._keys: list[MessageKey] = []  # keys of the messages from before the cut
        self._prompt_ids: Int64Array | None = None
        self._spans: list[Span] = []
        self._marks: list[Mark] = []
        self._start = Mark(0, 0, None, False, 0, 0 if rewrites is None else rewrites._state.calls)

    @property
    def turns(self) -> int:
        """Number of replies, including those before the beginning of a branch."""
        return sum(span.sampled for span in self._spans)

    @property
    def transcript(self) -> list[dict[str, Any]]:
        """The messages of all pieces between compactions, each once."""
        return [*self.earlier, *self.messages[self.num_repeated :]]

    @property
    def can_go_on(self) -> bool:
        """Whether the conversation ends with a truncated reply, which the next one may continue."""
        return self._state.truncated and self._state.spans == len(self._spans)

    @property
    def replaces(self) -> int | None:
        """The branch number of :attr:`rewrites` for the first request; otherwise None."""
        if self.rewrites is None or self._marks or self.rewrites.branch < 0:
            return None
        return self.rewrites.branch

    @property
    def token_ids(self) -> Int64Array:
        """``int64 [L]``, the first prompt and all later tokens."""
        return np.concatenate([self._first_prompt, *(span.token_ids for span in self._spans)])

    @property
    def pictures(self) -> tuple[Picture, ...]:
        """The pictures of :attr:`token_ids`, in order."""
        return (*self._prompt_pictures, *(picture for span in self._spans for picture in span.pictures))

    @property
    def length(self) -> int:
        """Number of :attr:`token_ids`."""
        return (
            0 if self._prompt_ids is None else len(self._prompt_ids) + sum(len(span.token_ids) for span in self._spans)
        )

    @property
    def last_mark(self) -> Mark | None:
        """The mark of the last reply if the conversation ends with it and can be continued; otherwise None."""
        if self.busy or self.is_cancelled or not self._marks or self._marks[-1].spans != len(self._spans):
            return None
        return self._marks[-1]

    def encode(self, new: Sequence[Message]) -> Int64Array:
        """Encode ``new`` messages as a continuation of this conversation.

        Raises:
            ValueError: there is no message in a new conversation, or the tokens have marks of pictures that no message
                has.
            TemplateError: the template refuses the messages.
        """
        # What the policy wrote in an earlier reply must not be read as a picture.
        new = [self._read_pictures.drop_marks(each) if each["role"] == "assistant" else each for each in new]
        if not self.messages:
            if not new:
                raise ValueError("the first turn needs a message: chat.turn(text), or chat.turn(row['prompt'])")
            return self._read_pictures.expand(self.template.encode(self.template.render(new)), new)
        if not new and self.can_go_on:
            return np.empty(0, dtype=np.int64)
        has_reply = self._state.spans == len(self._spans)  # else the call of its last message was cancelled
        return self._read_pictures.expand(self.template.extend(new, self._state.ended_by if has_reply else None), new)

    def is_rewritten_by(self, new: Sequence[Message]) -> bool:
        """Whether the chat template changes earlier tokens when ``new`` messages are appended.

        Raises:
            TemplateError: the template refuses the conversation.
        """
        if not self.template.rewrites or not self._marks or (not new and self.can_go_on):
            return False
        *history, reply = self.messages
        return not self.template.extends(history, reply, new, self._decode_last())

    def begin_again(
        self, new: Sequence[Message], keys: Sequence[MessageKey] | None = None
    ) -> tuple[Conversation, list[dict[str, Any]], list[MessageKey]]:
        """Return an empty conversation for the rewritten history, the messages of that history, and their keys."""
        message_keys = [*self._keys, *(map(make_message_key, new) if keys is None else keys)]
        conversation = Conversation(self.template, self._end_ids, self._read_pictures, -1, self)
        conversation.earlier, conversation.num_repeated = self.earlier, self.num_repeated
        return conversation, [dict(message) for message in (*self.messages, *new)], message_keys

    def compact(self, num_rebuilt: int) -> Conversation:
        """Return an empty conversation that goes on after a summary.

        ``num_rebuilt`` is the number of its first messages that repeat or replace those of this conversation.
        """
        conversation = Conversation(self.template, self._end_ids, self._read_pictures, -1, self)
        conversation.earlier, conversation.num_repeated = self.transcript, num_rebuilt
        return conversation

    def count_added(self, added: Int64Array) -> int:
        """Count the tokens of ``added`` against ``max_episode_tokens``.

        A first prompt does not count. In a rewritten history, all tokens from the first changed token on count.
        """
        if self.messages:
            return len(added)
        return 0 if self.rewrites is None else len(added) - _count_common(self.rewrites.token_ids, added)

    def append(self, new: Sequence[Message], added: Int64Array, keys: Sequence[MessageKey] | None = None) -> None:
        """Append messages and their tokens. ``keys`` are the keys of messages that were cut, from before the cut."""
        if not self.messages:
            self._prompt_ids = added
            self.prompt_messages = len(new)
            self._prompt_pictures = self._read_pictures.list_shown(new)
        elif len(added):
            shown = self._read_pictures.list_shown(new)
            self._spans.append(Span(added, np.zeros(len(added), dtype=np.float32), False, pictures=shown))
        self._keys += map(make_message_key, new) if keys is None else keys
        self.messages += [dict(message) for message in new]

    def take(self, turn: SampledTurn, *, continues: bool, with_tools: bool, stop: Sequence[str] = ()) -> Reply:
        """Append a sampled reply. With ``continues``, it is the continuation of a truncated reply."""
        before, state = self.length, self._state
        self._spans.append(Span(turn.token_ids, turn.log_probs, True, turn.policy_version, turn.sampling_mask))
        last = int(turn.token_ids[-1])
        ended_by = last if last in self._end_ids else None
        ids = turn.token_ids[:-1] if ended_by is not None else turn.token_ids
        text = self.template.decode(ids, with_special=False)
        # Some formats of tool calls have special tokens, so they are decoded too.
        is_marked = with_tools and not set(self.template.special_tokens).isdisjoint(MARKS[self.template.call_format])
        # The parts of a continued reply are decoded together: one may end within a character, and a tokenizer may strip
        # the space before its first token.
        open_span = state.open_span if continues else len(self._spans) - 1
        earlier = [token for span in self._spans[open_span:-1] for token in span.token_ids]
        whole = self.template.decode([*earlier, *ids], with_special=is_marked) if earlier or is_marked else text
        parsed = parse_reply(
            whole, with_tools=with_tools, call_format=self.template.call_format, schemas=self.template.tools
        )
        calls = tuple(
            ToolCall(name, arguments, f"call{state.calls + index:05}")
            for index, (name, arguments) in enumerate(parsed.calls)
        )
        if is_marked:
            parsed = replace(parsed, content=drop_tokens(parsed.content, self.template.special_tokens))
        message = make_reply_message(parsed.content, parsed.reasoning, calls)
        if continues:
            self._marks.pop()
            self._keys.pop()
            self.messages.pop()
        self.messages.append(copy_value(message))
        key = make_message_key(message)
        if turn.stopped and ended_by is None:
            key = (key[0], (*key[1], cut_stop(parsed.content, stop)), *key[2:])
        self._keys.append(key)
        counts = len(self.messages), len(self._spans)
        self._marks.append(Mark(*counts, ended_by, not turn.stopped, open_span, state.calls + len(calls)))
        reason: FinishReason = "stop" if turn.stopped else "length"
        return Reply(
            text,
            parsed.content,
            parsed.reasoning,
            calls,
            reason,
            turn.token_ids.copy(),  # the environment's: the conversation's are trained
            turn.log_probs.copy(),
            message,
            parsed.error,
            before,
        )

    def accept_shown(self, content: str, reasoning: str) -> None:
        """Recognise the last reply by its streamed content and reasoning too, which can differ from the final ones."""
        role, forms, name, calls, earlier = self._keys[-1]
        self._keys[-1] = role, tuple(dict.fromkeys((*forms, content))), name, calls, reasoning or earlier

    def find(self, keys: Sequence[MessageKey]) -> tuple[Mark, int] | None:
        """Find the last shared reply: ``keys`` contain it, all messages before it, and at least one message after it.

        Returns:
            The mark of this reply, and the number of messages up to it.
        """
        same = 0
        for ours, theirs in zip(self._keys, keys, strict=False):
            if not is_same_message(ours, theirs):
                break
            same += 1
        most = min(same, len(keys) - 1)
        return next(((mark, mark.messages) for mark in reversed(self._marks) if mark.messages <= most), None)

    def find_ids(self, token_ids: Int64Array) -> tuple[Mark, int] | None:
        """Find the last reply up to which ``token_ids`` equal this conversation, and the number of tokens up to it."""
        same = _count_common(self.token_ids, token_ids) if self._marks else 0
        for mark in reversed(self._marks):
            length = len(self._first_prompt) + sum(len(span.token_ids) for span in self._spans[: mark.spans])
            if length <= same:
                return mark, length
        return None

    def fork(self, mark: Mark) -> Conversation:
        """Return a new branch with the same messages and spans up to ``mark``."""
        conversation = Conversation(self.template, self._end_ids, self._read_pictures, -1)
        conversation._prompt_pictures = self._prompt_pictures
        conversation.messages, conversation._keys = self.messages[: mark.messages], self._keys[: mark.messages]
        conversation.prompt_messages, conversation._prompt_ids = self.prompt_messages, self._prompt_ids
        conversation._spans = self._spans[: mark.spans]
        conversation.earlier, conversation.num_repeated = self.earlier, self.num_repeated
        conversation._marks = self._marks[: self._marks.index(mark) + 1]
        return conversation

    def list_tokens(self, trained: set[int]) -> ChatTokens | None:
        """Return the tokens up to the last reply; None if the conversation has no reply after its branching point.

        Args:
            trained: ``id`` of the reply spans that are trained in earlier rows and are therefore not marked as sampled
                here. The spans of this row are added.
        """
        is_reply = [span.sampled and id(span) not in trained for span in self._spans]
        if not any(is_reply):
            return None
        last = len(is_reply) - is_reply[::-1].index(True)
        spans, flags = self._spans[:last], is_reply[:last]
        lengths = [len(span.token_ids) for span in spans]
        sampled = np.repeat(np.array(flags, dtype=bool), lengths)
        log_probs = np.concatenate([span.log_probs for span in spans])
        starts = [end - length for end, length in zip(np.cumsum(lengths).tolist(), lengths, strict=True)]
        replies = [span for span, is_sampled in zip(spans, flags, strict=True) if is_sampled]
        masks = [span.sampling_mask if is_sampled else None for span, is_sampled in zip(spans, flags, strict=True)]
        trained.update(map(id, replies))
        return ChatTokens(
            self._first_prompt,
            np.concatenate([span.token_ids for span in spans]),
            np.where(sampled, log_probs, 0.0).astype(np.float32),
            sampled,
            tuple(start for start, is_sampled in zip(starts, flags, strict=True) if is_sampled),
            self._state.truncated,
            tuple(span.policy_version for span in replies if span.policy_version is not None),
            None if all(mask is None for mask in masks) else join_masks(masks, lengths),
            self._prompt_pictures,
            tuple(picture for span in spans for picture in span.pictures),
        )

    @property
    def _state(self) -> Mark:
        """The mark of the last reply; before the first reply, the mark of an empty conversation."""
        return self._marks[-1] if self._marks else self._start

    @property
    def _first_prompt(self) -> Int64Array:
        assert self._prompt_ids is not None
        return self._prompt_ids

    def _decode_last(self) -> str:
        """Decode the last reply with special tokens, but without its end token."""
        spans = takewhile(
            lambda span: span.sampled, reversed(self._spans)
        )  # several if a truncated reply was continued
        ids = [token for span in [*spans][::-1] for token in span.token_ids]
        return self.template.decode(ids if self._state.ended_by is None else ids[:-1], with_special=True)


def _count_common(ids: Int64Array, other: Int64Array) -> int:
    """Length of the common prefix."""
    shorter = min(len(ids), len(other))
    differs = np.flatnonzero(ids[:shorter] != other[:shorter])
    return int(differs[0]) if len(differs) else shorter
