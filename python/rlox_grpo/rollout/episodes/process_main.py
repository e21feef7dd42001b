"""The worker process of sync environments and tools: play an episode or call a tool, and answer in JSON.

Jobs come as pickles from the trainer, which is trusted. Answers go back as lines of JSON of bounded length. An episode
is a conversation: the worker asks for a turn and waits for the reply.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from rlox_grpo.environments import EpisodeEnded, Reply
from rlox_grpo.environments.outcome import read_outcome
from rlox_grpo.rewards.worker import ORPHAN_GRACE, describe_error, read_frame, set_alarm, take_streams
from rlox_grpo.rollout.episodes.adapters import Environment, adapt_environment
from rlox_grpo.rollout.episodes.tools import ToolLimits, Tools, show_result

LONGEST_ANSWER = 4_000_000
"""Bytes of one answer: a longer one is an error of the environment."""


CHAT_FACTS = ("messages", "turns", "tokens_left", "base_url", "api_key")
"""What a worker asks of a chat beside turns and tools."""


@dataclass(frozen=True)
class Foreign:
    """What a worker process runs.

    Attributes:
        environment: As the user gave it, or None for a process of tools alone.
        tools: Functions, by their place.
        limits: Of tools that the environment calls itself, as methods of TRL's environments.
    """

    environment: Any
    tools: tuple[Callable[..., Any], ...]
    limits: ToolLimits


@dataclass(frozen=True)
class PlayJob:
    """An episode to play; ``timeout`` seconds between two turns."""

    row: dict[str, Any]
    seed: int
    timeout: float


@dataclass(frozen=True)
class CallJob:
    """A tool to call: its place in :attr:`Foreign.tools`, and what becomes of its result."""

    place: int
    arguments: dict[str, Any]
    max_chars: int
    timeout: float


class Line:
    """The connection to the trainer."""

    def __init__(self, jobs: BinaryIO, answers: BinaryIO) -> None:
        self._jobs, self._answers = jobs, answers
        self._owner = os.getpid()
        self.timeout = 0.0
        # A process that the environment forks and leaves must not hold the pipe: the trainer waits for its end.
        os.register_at_fork(after_in_child=self._close)

    def _close(self) -> None:
        for stream in (self._jobs, self._answers):
            os.close(stream.fileno())

    def answer(self, **fields: Any) -> None:
        """Send an answer.

        Raises:
            ValueError: it is longer than :data:`LONGEST_ANSWER`.
        """
        if os.getpid() != self._owner:
            os._exit(1)  # a fork that the environment made: its parent plays the episode
        line = json.dumps(fields, default=str).encode() + b"\n"
        if len(line) > LONGEST_ANSWER:
            raise ValueError(f"it sends {len(line)} bytes at once: expected at most {LONGEST_ANSWER}")
        self._answers.write(line)
        self._answers.flush()

    def receive(self) -> Any:
        """Wait for a job or for what was asked for. Ends the process when the trainer has gone."""
        self.set_alarm(0.0)
        frame = read_frame(self._jobs)
        if frame is None:
            os._exit(0)
        found = pickle.loads(frame)  # noqa: S301  the trainer's own
        self.set_alarm(self.timeout)
        return found

    def set_alarm(self, timeout: float) -> None:
        """End the process a while after ``timeout``; 0.0: never. Nobody else ends it where the trainer was killed."""
        if threading.current_thread() is threading.main_thread():
            set_alarm(timeout + ORPHAN_GRACE if timeout else 0.0)


class RemoteChat:
    """The chat of an episode whose environment runs in a worker process; see docs/several_turns.md.

    Attributes:
        seed: A seed of this episode, for the environment's own random numbers.
        tools: Tools that run in this process.
    """

    def __init__(self, line: Line, seed: int, limits: ToolLimits) -> None:
        self.seed = seed
        self.tools = Tools((), limits)
        self._line = line

    def __getattr__(self, name: str) -> Any:
        """The facts of a chat, from the trainer."""
        if name not in CHAT_FACTS:
            raise AttributeError(f"a chat has no {name!r}")
        return self._ask(get=name)

    async def turn(
        self,
        messages: Any = None,
        *,
        tools: Sequence[Callable[..., Any]] | None = None,
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] = (),
    ) -> Reply:
        """Append ``messages`` and sample one reply.

        Raises:
            EpisodeEnded: a limit has ended the episode.
            ValueError: malformed messages, or ``tools``, which the trainer's process cannot get from this one.
        """
        _refuse_tools(tools)
        return self.ask_turn(messages, max_new_tokens, stop)

    def ask_turn(self, messages: Any, max_new_tokens: int | None, stop: str | Sequence[str]) -> Reply:
        """:meth:`turn`, for a sync function."""
        reply: Reply = self._ask(turn=messages, max_new_tokens=max_new_tokens, stop=stop)
        return reply

    async def complete(
        self, messages: Any, *, tools: Any = None, max_new_tokens: int | None = None, stop: str | Sequence[str] = ()
    ) -> Reply:
        """See :meth:`rlox_grpo.rollout.episodes.chat.Chat.complete`."""
        return self.ask_completion(messages, tools, max_new_tokens, stop)

    def ask_completion(self, messages: Any, tools: Any, max_new_tokens: int | None, stop: str | Sequence[str]) -> Reply:
        """:meth:`complete`, for a sync function."""
        reply: Reply = self._ask(complete=messages, schemas=tools, max_new_tokens=max_new_tokens, stop=stop)
        return reply

    async def call_tools(self, reply: Reply) -> list[dict[str, Any]]:
        """Call the tools that ``reply`` asks for; return their messages in the order of the calls.

        Raises:
            EpisodeEnded: ``on_parse_error`` or ``on_tool_error`` ends the episode.
        """
        if self.tools:
            return await self.tools.answer(reply)
        return self.ask_tools(reply)

    def ask_tools(self, reply: Reply) -> list[dict[str, Any]]:
        """:meth:`call_tools`, for a sync function."""
        calls = [[call.name, dict(call.arguments), call.id] for call in reply.tool_calls]
        found: list[dict[str, Any]] = self._ask(call_tools=calls, parse_error=reply.parse_error)
        return found

    def _ask(self, **question: Any) -> Any:
        self._line.answer(**question)
        kind, found = self._line.receive()
        if kind == "ended":
            raise EpisodeEnded(*found)
        if kind == "error":
            raise ValueError(found)
        return found


class BlockingChat:
    """:class:`RemoteChat` for a sync function."""

    def __init__(self, chat: RemoteChat) -> None:
        self._chat = chat

    def turn(
        self, messages: Any = None, *, tools: Any = None, max_new_tokens: int | None = None, stop: Any = ()
    ) -> Reply:
        """See :meth:`RemoteChat.turn`."""
        _refuse_tools(tools)
        return self._chat.ask_turn(messages, max_new_tokens, stop)

    def complete(self, messages: Any, *, tools: Any = None, max_new_tokens: int | None = None, stop: Any = ()) -> Reply:
        """See :meth:`RemoteChat.complete`."""
        return self._chat.ask_completion(messages, tools, max_new_tokens, stop)

    def call_tools(self, reply: Reply) -> list[dict[str, Any]]:
        """See :meth:`RemoteChat.call_tools`."""
        return self._chat.ask_tools(reply)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._chat, name)


def _refuse_tools(tools: Any) -> None:
    if tools is not None:
        raise ValueError(
            "chat.turn(tools=) needs an async environment where turn_timeout or episode_timeout is set: "
            "use GRPO(tools=)"
        )


def main() -> None:
    """Serve jobs until the trainer closes the stream."""
    jobs, answers = take_streams()
    line = Line(jobs, answers)
    try:
        foreign: Foreign = pickle.loads(read_frame(jobs) or b"")  # noqa: S301  the trainer's own
        environment = None
        if foreign.environment is not None:  # the trainer has checked its tools
            environment = adapt_environment(foreign.environment, foreign.tools, check_tools=False)
    except BaseException as error:  # noqa: BLE001  reported, and raised over there
        line.answer(failed=describe_error(error))
        return
    line.answer(ready=True)
    while True:
        line.timeout = 0.0
        try:
            job: PlayJob | CallJob = line.receive()
        except Exception as error:  # noqa: BLE001  a column whose class cannot be imported here
            line.answer(error=f"its row cannot be read in a worker process: {describe_error(error)}", turns=0)
            continue
        line.timeout = job.timeout
        line.set_alarm(job.timeout)
        if isinstance(job, CallJob):
            _call(foreign.tools[job.place], job, line)
        else:
            assert environment is not None
            _play(environment, job, RemoteChat(line, job.seed, foreign.limits), line)


def _call(function: Callable[..., Any], job: CallJob, line: Line) -> None:
    try:
        text = show_result(function(**job.arguments))
        line.answer(text=text[: job.max_chars].encode("utf-8", "replace").decode(), length=len(text))
    except BaseException as error:  # noqa: BLE001  even sys.exit() in a tool is that call's error alone
        line.answer(error=describe_error(error))


def _play(environment: Environment, job: PlayJob, chat: RemoteChat, line: Line) -> None:
    def answer(**fields: Any) -> None:
        tools = chat.tools
        line.answer(**fields, tools=[tools.calls, tools.errors, tools.cut, tools.seconds])

    try:
        if environment.function is not None:
            outcome = read_outcome(environment.function(job.row, BlockingChat(chat)))
        else:
            outcome = read_outcome(asyncio.run(_await(environment.play(job.row, chat))))  # type: ignore[arg-type]
        answer(
            reward=outcome.reward,
            turn_rewards=outcome.turn_rewards,
            stop_reason=outcome.stop_reason,
            metrics=dict(outcome.metrics),
        )
    except EpisodeEnded as ended:
        answer(ended=ended.reason, told=str(ended)[:2000])
    except BaseException as error:  # noqa: BLE001  even sys.exit() in an environment ends its episode alone
        answer(error=describe_error(error))


async def _await(awaitable: Awaitable[Any]) -> Any:
    return await awaitable
