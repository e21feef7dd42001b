"""Play an episode without a model: a person or a script writes the replies."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from rlox_grpo.config.records.episodes import EpisodeConfig
from rlox_grpo.environments import EpisodeEnded, Outcome, Reply, ToolCall
from rlox_grpo.errors import ConfigError
from rlox_grpo.prompts.picture_messages import is_picture
from rlox_grpo.rewards.copies import copy_row, copy_value
from rlox_grpo.rollout.episodes.adapters import adapt_environment, check_columns, check_outcome, end_episode
from rlox_grpo.rollout.episodes.budget import check_room
from rlox_grpo.rollout.episodes.compaction import Compacted, draw_compaction
from rlox_grpo.rollout.episodes.messages import (
    Message,
    bound_messages,
    list_messages,
    make_reply_message,
    read_stop,
    refuse_late_tools,
    refuse_long_prompt,
)
from rlox_grpo.rollout.episodes.parsing import parse_reply
from rlox_grpo.rollout.episodes.played_pictures import PlayedPictures
from rlox_grpo.rollout.episodes.scheduler import run_coroutine
from rlox_grpo.rollout.episodes.tools import ToolLimits, Tools, make_schemas

MAX_SHOWN = 2000
"""Maximum characters of a message that are shown."""

TOKEN_CHARS = 4
"""Characters that count as a token of ``compact_at_tokens``, because there is no tokenizer."""


class NoReplyError(Exception):
    """The person or the script has no further reply."""


class PlayedChat:
    """Replaces :class:`rlox_grpo.rollout.episodes.chat.Chat` if no model samples replies.

    Replies have no tokens: ``token_ids`` and ``log_probs`` are empty, and ``tokens_left`` and ``remaining_tokens`` are
    None. The endpoint and :meth:`complete_ids` need a model.

    Attributes:
        seed: seed of the environment's random numbers.
        ended: the limit that has ended the episode, or None.
        turns: number of replies so far.
        prompt_messages: number of messages in the first prompt.
        branch_messages: the conversations before the last call of :meth:`complete` that did not continue one.
        compactions: the compactions so far, in units of :data:`TOKEN_CHARS`.
        parse_errors: number of replies with a tool call that cannot be parsed.
        waiting_since: ``time.monotonic()`` of the last return to the environment; None while a reply or tools are
            awaited.
    """

    tokens_left: int | None = None
    remaining_tokens: int | None = None
    cancelled_calls = 0
    has_reported_end = abandoned = False
    calling_since: float | None = None

    def __init__(
        self,
        read_reply: Callable[[], str],
        say: Callable[[str], None],
        config: EpisodeConfig,
        tools: Sequence[Callable[..., Any]],
        seed: int,
        pictures: PlayedPictures,
    ) -> None:
        """Begin an empty conversation.

        Args:
            read_reply: returns the next reply; raises NoReplyError at the end.
            say: shows a line.
            config: the limits; limits of tokens are ignored.
            tools: functions that replies may call.
            seed: see above.
            pictures: reads the pictures of messages.
        """
        self.seed = seed
        self.ended: str | None = None
        self.turns = 0
        self._read_reply, self._say, self._config, self._pictures = read_reply, say, config, pictures
        self._limits = ToolLimits.for_run(config)
        self._messages: list[dict[str, Any]] = []
        self._context: list[dict[str, Any]] = []  # what the policy sees; shorter than the messages after a compaction
        self._compaction = draw_compaction(config, seed, 0)
        self._calls = 0
        self.prompt_messages = self.parse_errors = 0
        self.branch_messages: list[list[dict[str, Any]]] = []
        self.compactions: list[Compacted] = []
        self.waiting_since: float | None = time.monotonic()
        self._set_tools(tools)

    @property
    def remaining_turns(self) -> int:
        """Number of replies that ``max_turns`` still allows."""
        return self._config.max_turns - self.turns

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation so far; a copy."""
        return [copy_value(message) for message in self._messages]

    async def turn(
        self,
        messages: str | Sequence[Message] | None = None,
        *,
        tools: Sequence[Callable[..., Any]] | None = None,
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] = (),
    ) -> Reply:
        """Show ``messages`` and read one reply, which ends at the first of the ``stop`` strings.

        Raises:
            EpisodeEnded: there were ``max_turns`` replies.
            NoReplyError: there is no further reply.
            ValueError: as in :meth:`rlox_grpo.rollout.episodes.chat.Chat.turn`.
        """
        if self.ended is not None:
            raise RuntimeError(f"chat.turn was called after the episode had ended by {self.ended}")
        check_room(max_new_tokens)
        stop = read_stop(stop)
        if self.waiting_since is None:
            raise ValueError("chat.turn was called while another turn or its tools were under way: await that first")
        bound = self.tools.bound if self._messages else refuse_long_prompt
        new = bound_messages(list_messages(messages, self._pictures), bound)
        if tools is not None:
            refuse_late_tools(self._messages)
            self._set_tools(tools)
        if not new and not self._messages:
            raise ValueError("the first turn needs a message: chat.turn(text), or chat.turn(row['prompt'])")
        if self.turns >= self._config.max_turns:
            self.ended = "max_turns"
            raise EpisodeEnded("max_turns")
        self.prompt_messages = self.prompt_messages or len(new)
        self.waiting_since = None
        try:
            await asyncio.sleep(0)  # a turn of the same environment beside this one is refused, as in training
            self._compact(new)
            return self._reply(new, stop)
        finally:
            self.waiting_since = time.monotonic()

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] = (),
    ) -> Reply:
        """Show a complete list of messages, and read one reply; ``tools`` are ignored.

        Messages that do not continue the conversation open a branch.

        Raises:
            EpisodeEnded, NoReplyError, ValueError: see :meth:`turn`.
        """
        if self.ended is not None:
            raise EpisodeEnded(self.ended)
        check_room(max_new_tokens)
        stop = read_stop(stop)
        history = list_messages(messages, self._pictures)
        if self.turns >= self._config.max_turns:
            self.ended = "max_turns"
            raise EpisodeEnded("max_turns")
        shared = len(self._messages)
        if history[:shared] != self._messages:
            self.branch_messages.append(self.messages)
            self._say("--- a branch: these messages do not continue the conversation ---")
            self._messages, self._context, shared = [], [], 0
        self.prompt_messages = self.prompt_messages or len(history)
        return self._reply(bound_messages(history[shared:], self.tools.bound), stop)

    async def complete_ids(self, token_ids: Any, **_: Any) -> Reply:
        """Raise ValueError: there is no tokenizer."""
        raise ValueError("chat.complete_ids needs a tokenizer, and play has none: use rlox-grpo eval --environment")

    def _reply(self, new: Sequence[Message], stop: tuple[str, ...]) -> Reply:
        """Show ``new`` messages and read the reply to them."""
        for message in new:
            self._add(message)
            self._say(_describe_message(message, self._pictures))
        text = _cut_at(self._read_reply(), stop)
        self.turns += 1
        call_format = self._config.call_format
        parsed = parse_reply(
            text,
            with_tools=bool(self.tools),
            call_format="hermes" if call_format == "auto" else call_format,  # there is no chat template
            schemas=self._schemas,
        )
        calls = tuple(
            ToolCall(name, arguments, f"call_{self._calls + index}")
            for index, (name, arguments) in enumerate(parsed.calls)
        )
        self._calls += len(calls)
        self.parse_errors += parsed.error is not None
        message = make_reply_message(parsed.content, parsed.reasoning, calls)
        self._add(message)
        empty = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32)
        return Reply(text, parsed.content, parsed.reasoning, calls, "stop", *empty, message, parsed.error)

    @property
    def base_url(self) -> NoReturn:
        """Raise ValueError: there is no model."""
        raise ValueError("this environment asks a model by chat.base_url: use rlox-grpo eval --environment")

    @property
    def api_key(self) -> NoReturn:
        """Raise ValueError: there is no model."""
        raise ValueError("this environment asks a model by chat.api_key: use rlox-grpo eval --environment")

    def pause(self) -> None:
        """Stop the environment's clock, as in training; here no clock runs."""
        self.waiting_since = None

    def resume(self) -> None:
        """Start the environment's clock."""
        self.waiting_since = time.monotonic()

    async def finish_streams(self) -> None:
        """Return: no reply is streamed."""

    def rows(self) -> list[Any]:
        """Return no rows: replies have no tokens."""
        return []

    @property
    def prompt_tools(self) -> list[Mapping[str, Any]]:
        """JSON schemas of the tools that replies may call."""
        return [*self._schemas]

    async def call_tools(self, reply: Reply) -> list[dict[str, Any]]:
        """See :meth:`rlox_grpo.rollout.episodes.chat.Chat.call_tools`."""
        self.waiting_since = None
        try:
            return await self.tools.answer(reply, self._pictures)
        except EpisodeEnded as ended:
            self.ended = ended.reason
            raise
        finally:
            self.waiting_since = time.monotonic()

    def _add(self, message: Message) -> None:
        """Append a message to the conversation, and to what the policy sees of it."""
        self._messages.append(copy_value(dict(message)))
        self._context.append(copy_value(dict(message)))

    def _compact(self, new: Sequence[Message]) -> None:
        """Read a summary if ``new`` messages would make the conversation too long, and show what stays."""
        compaction, before = self._compaction, self._context
        if compaction is None or not compaction.shortens(before):
            return
        num_chars = sum(len(str(message.get("content") or "")) for message in (*before, *new))
        if num_chars <= TOKEN_CHARS * compaction.at_tokens:
            return
        self._messages.append(compaction.request)
        self._say(f"--- compaction: the conversation has about {num_chars // TOKEN_CHARS} tokens ---")
        self._say(_describe_message(compaction.request, self._pictures))
        summary = parse_reply(self._read_reply(), with_tools=False)
        self._messages.append(make_reply_message(summary.content, summary.reasoning))
        self._context = compaction.rebuild(before, summary.content)
        after = sum(len(str(message.get("content") or "")) for message in (*self._context, *new))
        lengths = (num_chars, after, len(summary.content))
        self.compactions.append(Compacted(*(length // TOKEN_CHARS for length in lengths)))
        self._say(f"--- the policy now sees these {len(self._context)} of {len(before)} messages ---")
        for message in self._context:
            self._say(_describe_message(message, self._pictures))
        self._say("--- and what follows ---")

    def _set_tools(self, tools: Sequence[Callable[..., Any]]) -> None:
        self.tools = Tools(tools, self._limits)
        self._schemas = make_schemas(tools)
        for schema in self._schemas:
            function = schema["function"]
            arguments = ", ".join(function.get("parameters", {}).get("properties", {}))
            self._say(f"tool {function['name']}({arguments}): {function.get('description', '')}")


@dataclass(frozen=True)
class PlayedEpisode:
    """An episode that was played.

    Attributes:
        outcome: the result; None if the replies ended before the episode.
        messages: the conversation.
        replies: the replies as they were read, including summaries.
        pictures: the pictures of the row and of the messages.
    """

    outcome: Outcome | None
    messages: tuple[dict[str, Any], ...]
    replies: tuple[str, ...]
    pictures: PlayedPictures = field(default_factory=PlayedPictures)


def play_episode(
    environment: Any,
    row: Mapping[str, Any],
    read_reply: Callable[[], str],
    say: Callable[[str], None],
    *,
    tools: Sequence[Callable[..., Any]] = (),
    config: EpisodeConfig | None = None,
    seed: int = 0,
) -> Outcome:
    """Play one episode, and show its messages, tool results, reward and stop reason.

    Args:
        environment: the argument of :class:`rlox_grpo.GRPO`.
        row: the data row.
        read_reply: returns the next reply; raises NoReplyError at the end.
        say: shows a line.
        tools: functions that replies may call.
        config: the limits of episodes.
        seed: ``chat.seed``.

    Raises:
        ConfigError: the environment or a tool cannot be used.
        ValueError: the row lacks a column that the environment needs.
        NoReplyError: the replies ended before the episode.
        Exception: the environment raised it; its traceback was shown.
    """
    played = play_whole_episode(environment, row, read_reply, say, tools=tools, config=config, seed=seed)
    if played.outcome is None:
        raise NoReplyError
    return played.outcome


def play_whole_episode(
    environment: Any,
    row: Mapping[str, Any],
    read_reply: Callable[[], str],
    say: Callable[[str], None],
    *,
    tools: Sequence[Callable[..., Any]] = (),
    config: EpisodeConfig | None = None,
    seed: int = 0,
    pictures: PlayedPictures | None = None,
) -> PlayedEpisode:
    """Like :func:`play_episode`, and return the conversation and the replies too, also if the replies ended.

    ``pictures`` are those of the row, whose prompt shows them by their digests; None: they are read from the row.
    """
    if isinstance(environment, str):
        raise ConfigError("a command asks a model by its endpoint: use rlox-grpo eval --environment instead of play")
    config = config or EpisodeConfig.create()
    if pictures is None:
        pictures = PlayedPictures()
        row = pictures.read_row(row, Path())
    adapted = adapt_environment(environment, tools)
    check_columns(adapted, row, "the row", ": give rows with --data")
    replies: list[str] = []

    def read() -> str:
        replies.append(read_reply())
        return replies[-1]

    chat: Any = PlayedChat(read, say, config, adapted.tools, seed, pictures)
    try:
        returned = run_coroutine(lambda: adapted.play(copy_row(row, "the row"), chat))
        outcome = check_outcome(returned, chat.turns, chat.ended)
    except EpisodeEnded as ended:
        outcome = end_episode(adapted, config, ended.reason)
        say(f"ended: {ended}")
    except NoReplyError:
        return PlayedEpisode(None, tuple(chat.messages), tuple(replies), pictures)
    except KeyboardInterrupt:
        raise
    except Exception:
        say(traceback.format_exc())
        raise
    for line in _describe_outcome(outcome, chat.turns):
        say(line)
    return PlayedEpisode(outcome, tuple(chat.messages), tuple(replies), pictures)


def _describe_outcome(outcome: Outcome, turns: int) -> list[str]:
    lines = [f"turns        {turns}", f"stop reason  {outcome.stop_reason}"]
    lines.append(f"reward       {'none: the episode is unscored' if outcome.reward is None else f'{outcome.reward:g}'}")
    if outcome.turn_rewards is not None:
        lines.append(f"by turn      {'  '.join(f'{reward:g}' for reward in outcome.turn_rewards)}")
    return lines + [f"metric       {name} {value:g}" for name, value in outcome.metrics.items()]


def _describe_message(message: Message, pictures: PlayedPictures) -> str:
    name = f" {message['name']}" if message.get("name") else ""
    content = message.get("content")
    text = content if isinstance(content, str) else repr(content)
    if isinstance(content, list) and any(map(is_picture, content)):
        text = " ".join(
            pictures.describe(entry["digest"]) if is_picture(entry) else str(entry.get("text", entry))
            for entry in content
        )
    more = f" … ({len(text)} characters)" if len(text) > MAX_SHOWN else ""
    return f"{message.get('role', '?')}{name}: {_escape(text[:MAX_SHOWN])}{more}"


def _escape(text: str) -> str:
    """Escape control characters, which could move the cursor or change the terminal's colours."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def _cut_at(text: str, stop: Sequence[str]) -> str:
    ends = [position + len(ending) for ending in stop if ending and (position := text.find(ending)) >= 0]
    return text[: min(ends)] if ends else text
