"""The conversation of one episode: messages for the environment, exact tokens for the update."""

from __future__ import annotations

import time
from asyncio import CancelledError
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from rlox_grpo.environments import EpisodeEnded, Reply, ToolCall
from rlox_grpo.prompts.rows import add_system_message
from rlox_grpo.rollout.engines.turns import SampledTurn, TurnRequest
from rlox_grpo.rollout.episodes.parsing import MARKS, parse_reply
from rlox_grpo.rollout.episodes.template import Message, Template
from rlox_grpo.rollout.episodes.tools import Tools, make_schemas
from rlox_grpo.types import FinishReason, Float32Array, Int64Array

MAX_PROMPT_CHARS = 2_000_000
"""A longer message of the first prompt is an error."""

GiveTools: TypeAlias = "Callable[[Sequence[Callable[..., Any]]], tuple[Template, Tools]]"


@dataclass(frozen=True)
class Budget:
    """The limits of an episode.

    Attributes:
        max_turns: Replies.
        max_new_tokens: Tokens of a reply.
        max_episode_tokens: Tokens after the first prompt, replies and observations; None: as many as fit the model.
        max_length: Tokens of the whole conversation that the model takes; None when it states no limit.
    """

    max_turns: int
    max_new_tokens: int
    max_episode_tokens: int | None = None
    max_length: int | None = None


@dataclass(frozen=True, eq=False)
class ChatTokens:
    """The tokens of a conversation so far.

    Attributes:
        prompt_ids: ``int64 [P]``, the first prompt.
        token_ids: ``int64 [T]``, all that follows.
        log_probs: ``float32 [T]``, 0.0 where the policy did not sample.
        sampled: ``bool [T]``.
        turns: Offsets in ``token_ids`` at which the replies begin.
        truncated: Whether the last reply has no end token or stop string.
    """

    prompt_ids: Int64Array
    token_ids: Int64Array
    log_probs: Float32Array
    sampled: np.ndarray[Any, np.dtype[np.bool_]]
    turns: tuple[int, ...]
    truncated: bool


class Chat:
    """The policy, as an environment talks to it. One chat belongs to one episode.

    Attributes:
        seed: A seed of this episode, for the environment's own random numbers.
        prompt_messages: How many messages make up the first prompt.
        ended: The limit that has ended the episode, or None.
        waiting_since: When the environment was last given control, by ``time.monotonic()``; None while it waits.
    """

    def __init__(
        self,
        template: Template,
        sample: Callable[[TurnRequest], Awaitable[SampledTurn]],
        budget: Budget,
        *,
        episode: tuple[int, int] = (0, 0),
        seed: int = 0,
        tools: Tools | None = None,
        end_ids: Sequence[int] = (),
        give_tools: GiveTools | None = None,
        system_prompt: str | None = None,
    ) -> None:
        """Begin an empty conversation.

        Args:
            template: renders it, with the schemas of ``tools``.
            sample: samples one reply.
            budget: the limits.
            episode: the prompt's place in its step and the completion's in its group.
            seed: see above.
            tools: what :meth:`call_tools` calls.
            end_ids: the engine's end tokens.
            give_tools: the template and the tools for functions that the environment gives at its first turn.
            system_prompt: what the system message before the first one says, or None.
        """
        self.seed = seed
        self.tools = tools if tools is not None else Tools(())
        self.prompt_messages = 0
        self.ended: str | None = None
        self.waiting_since: float | None = time.monotonic()
        self._template, self._sample, self._budget, self._episode = template, sample, budget, episode
        self._end_ids = frozenset(end_ids)
        self._system_prompt = system_prompt
        self._give_tools = give_tools or (
            lambda functions: (Template(template.tokenizer, make_schemas(functions)), Tools(functions))
        )
        self._messages: list[dict[str, Any]] = []
        self._prompt_ids: Int64Array | None = None
        self._ids: list[Int64Array] = []  # after the first prompt, in spans
        self._log_probs: list[Float32Array] = []
        self._sampled: list[bool] = []
        self._ended_by: int | None = None  # the end token of the last reply
        self._truncated = False
        self._open_text = ""  # of a truncated reply, which may go on
        self._calls = 0

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation so far; a copy."""
        return [dict(message) for message in self._messages]

    @property
    def turns(self) -> int:
        """Replies so far."""
        return sum(self._sampled)

    @property
    def tokens_left(self) -> int | None:
        """Tokens that the episode may still have, replies and messages; None where nothing limits them."""
        used = sum(map(len, self._ids))
        whole = used + (0 if self._prompt_ids is None else len(self._prompt_ids))
        limits = ((self._budget.max_episode_tokens, used), (self._budget.max_length, whole))
        left = [limit - taken for limit, taken in limits if limit is not None]
        return max(0, min(left)) if left else None

    def pause(self) -> None:
        """Stop the environment's clock while it waits for a worker process."""
        self.waiting_since = None

    def resume(self) -> None:
        """Start the environment's clock."""
        self.waiting_since = time.monotonic()

    async def turn(
        self,
        messages: str | Sequence[Message] | None = None,
        *,
        tools: Sequence[Callable[..., Any]] | None = None,
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] = (),
    ) -> Reply:
        """Append ``messages`` and sample one reply.

        Args:
            messages: a text, which is one user message; messages; or None to let the policy go on: a truncated reply
                is continued, and after a complete one another begins.
            tools: functions that the policy may call in this episode, instead of the option's; at the first turn only,
                because templates list tools at the beginning.
            max_new_tokens: limit of this reply, at most the option ``max_new_tokens``, which is the default.
            stop: a string, or several, that end this reply, beside those of the option ``stop``.

        Raises:
            EpisodeEnded: a limit has ended the episode.
            ValueError: no message for the first turn, or a malformed one.
            TemplateError: the chat template refuses the messages.
        """
        if self.ended is not None:  # an environment that goes on after the end would never return
            raise CancelledError(f"chat.turn was called after the episode had ended by {self.ended}")
        if self.waiting_since is None:
            raise ValueError("chat.turn was called while another turn or its tools were under way: await that first")
        new = self._bound(_list_messages(messages))
        if new and not self._messages and self._system_prompt is not None:
            new = add_system_message(new, self._system_prompt, self._episode[0])
        if tools is not None:
            self._set_tools(tools)
        if max_new_tokens is not None and max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {max_new_tokens}: expected at least 1")
        if self.turns >= self._budget.max_turns:
            self._end("max_turns")
        added = self._encode(new)
        room = self._find_room(len(added), max_new_tokens)
        continues = not new and self._truncated
        self._append(new, added)
        context = np.concatenate([self._first_prompt, *self._ids])
        request = TurnRequest(
            self._episode, self.turns, context, room, (stop,) if isinstance(stop, str) else tuple(stop)
        )
        self.waiting_since = None
        sampled = await self._sample(request)
        self.waiting_since = time.monotonic()
        return self._take(sampled, continues=continues)

    async def call_tools(self, reply: Reply) -> list[dict[str, Any]]:
        """Call the tools that ``reply`` asks for, at the same time; return their messages in the order of the calls.

        Errors are messages for the policy. A reply without a call gives an empty list.

        Raises:
            EpisodeEnded: ``on_parse_error`` or ``on_tool_error`` ends the episode.
        """
        self.waiting_since = None
        try:
            return await self.tools.answer(reply)
        except EpisodeEnded as ended:
            self.ended = ended.reason
            raise
        finally:
            self.waiting_since = time.monotonic()

    def tokens(self) -> ChatTokens:
        """The tokens so far.

        Raises:
            ValueError: the policy never had a turn.
        """
        if not any(self._sampled):
            raise ValueError("the environment ended before the policy had a turn: call chat.turn at least once")
        last = len(self._sampled) - self._sampled[::-1].index(True)  # messages that no reply follows are left out
        lengths = [len(ids) for ids in self._ids[:last]]
        starts = np.cumsum([0, *lengths])
        return ChatTokens(
            self._first_prompt,
            np.concatenate(self._ids[:last]),
            np.concatenate(self._log_probs[:last]).astype(np.float32),
            np.repeat(np.array(self._sampled[:last], dtype=bool), lengths),
            tuple(int(start) for start, sampled in zip(starts, self._sampled[:last], strict=False) if sampled),
            self._truncated,
        )

    @property
    def _first_prompt(self) -> Int64Array:
        assert self._prompt_ids is not None
        return self._prompt_ids

    def _bound(self, new: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Cut long observations; a first prompt may have any length up to a bound."""
        for message in new:
            content = message["content"]
            if isinstance(content, str):
                message["content"] = self._bound_text(content)
            elif isinstance(content, list):  # of parts
                message["content"] = [
                    {**part, "text": self._bound_text(part["text"])}
                    if isinstance(part, Mapping) and isinstance(part.get("text"), str)
                    else part
                    for part in content
                ]
        return new

    def _bound_text(self, text: str) -> str:
        if self._messages:
            return self.tools.bound(text)
        if len(text) > MAX_PROMPT_CHARS:
            raise ValueError(f"a message has {len(text)} characters: expected at most {MAX_PROMPT_CHARS}")
        return text

    def _set_tools(self, functions: Sequence[Callable[..., Any]]) -> None:
        if self._messages:
            raise ValueError("tools can be given at the first turn only: templates list them at the beginning")
        self._template, self.tools = self._give_tools(functions)

    def _encode(self, new: Sequence[Message]) -> Int64Array:
        if not self._messages:
            if not new:
                raise ValueError("the first turn needs a message: chat.turn(text), or chat.turn(row['prompt'])")
            return self._template.encode(self._template.render(new))
        if not new and self._truncated:
            return np.empty(0, dtype=np.int64)
        return self._template.extend(new, self._ended_by)

    def _find_room(self, added: int, asked: int | None) -> int:
        """Tokens that the reply may have once ``added`` tokens precede it; ends the episode where there are none."""
        budget, first = self._budget, not self._messages
        used = sum(map(len, self._ids)) + (0 if first else added)
        whole = used + (added if first else len(self._first_prompt))
        room = min(budget.max_new_tokens, asked or budget.max_new_tokens)
        if budget.max_episode_tokens is not None:
            room = min(room, budget.max_episode_tokens - used)
            if room < 1:
                self._end("max_tokens")
        if budget.max_length is not None:
            room = min(room, budget.max_length - whole)
            if room < 1:
                self._end("context")
        return room

    def _append(self, new: Sequence[Message], added: Int64Array) -> None:
        if not self._messages:
            self._prompt_ids = added
            self.prompt_messages = len(new)
        elif len(added):
            self._ids.append(added)
            self._log_probs.append(np.zeros(len(added), dtype=np.float32))
            self._sampled.append(False)
        self._messages += [dict(message) for message in new]

    def _take(self, turn: SampledTurn, *, continues: bool) -> Reply:
        self._ids.append(turn.token_ids)
        self._log_probs.append(turn.log_probs)
        self._sampled.append(True)
        self._truncated = not turn.stopped
        last = int(turn.token_ids[-1])
        self._ended_by = last if last in self._end_ids else None
        ids = turn.token_ids[:-1] if self._ended_by is not None else turn.token_ids
        text = self._template.tokenizer.decode(
            ids.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        marked = self._decode_with_marks(ids, text)
        whole = self._open_text + marked if continues else marked
        self._open_text = "" if turn.stopped else whole
        parsed = parse_reply(whole, with_tools=bool(self.tools), call_format=self._template.call_format)
        calls = tuple(
            ToolCall(name, arguments, f"call{self._calls + place:05}")
            for place, (name, arguments) in enumerate(parsed.calls)
        )
        self._calls += len(calls)
        if marked is not text:
            parsed = replace(parsed, content=self._drop_special(parsed.content))
        message = make_reply_message(parsed.content, parsed.reasoning, calls)
        if continues:
            self._messages[-1] = message
        else:
            self._messages.append(message)
        reason: FinishReason = "stop" if turn.stopped else "length"
        return Reply(
            text, parsed.content, parsed.reasoning, calls, reason, turn.token_ids, turn.log_probs, message, parsed.error
        )

    def _decode_with_marks(self, ids: Int64Array, text: str) -> str:
        """``text`` with special tokens, where tool calls are written with some of them."""
        tokenizer = self._template.tokenizer
        special = set(getattr(tokenizer, "all_special_tokens", ()))
        if not self.tools or not special.intersection(MARKS[self._template.call_format]):
            return text
        marked: str = tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return marked

    def _drop_special(self, text: str) -> str:
        for token in map(str, self._template.tokenizer.all_special_tokens):
            text = text.replace(token, "")
        return text

    def _end(self, reason: str) -> None:
        self.ended = reason
        raise EpisodeEnded(reason)


def make_reply_message(content: str, reasoning: str | None, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """A reply as a message that chat templates know."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
            for call in calls
        ]
    return message


def _list_messages(messages: str | Sequence[Message] | None) -> list[dict[str, Any]]:
    if messages is None:
        return []
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if isinstance(messages, Mapping):
        messages = [messages]
    found = []
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise ValueError(f"messages[{place}] is {str(message)[:80]!r}: expected {{'role': …, 'content': …}}")
        content = message["content"]
        if isinstance(content, str):
            _refuse_surrogates(content, place)
        found.append(dict(message))
    if found and found[-1]["role"] == "assistant":
        raise ValueError("the last message has the role 'assistant': the policy writes that one")
    return found


def _refuse_surrogates(text: str, place: int) -> None:
    """Raise ValueError for half of a UTF-16 pair, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"messages[{place}] holds a lone surrogate at character {error.start}") from None
