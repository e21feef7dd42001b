"""Main function of the worker processes in which sync environments and tools run.

The trainer sends jobs as pickles, because the worker trusts it. The worker answers with lines of JSON of bounded
length. While it plays an episode, it also sends requests, such as for a reply of the policy, and waits for the
trainer's answer.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

from rlox_grpo.environments import EpisodeEnded, Reply
from rlox_grpo.environments.outcome import read_outcome
from rlox_grpo.rewards.worker import ORPHAN_GRACE, describe_error, read_frame, set_alarm, take_streams
from rlox_grpo.rollout.episodes.adapters import Environment, adapt_environment
from rlox_grpo.rollout.episodes.pictures import RefusedPictures, list_entries
from rlox_grpo.rollout.episodes.scheduler import run_coroutine
from rlox_grpo.rollout.episodes.tools import ToolLimits, Tools, show_result

STAYS_IN_WORKER = "a worker process does not send one; make the tool async, or leave out the timeout"
"""Why a tool's picture is an error in a worker process."""

LONGEST_ANSWER = 4_000_000
"""Maximum bytes of one answer; a longer answer is an error of the environment."""

_RENEW_SECONDS = 0.5
"""Seconds between two times that :meth:`TrainerPipe.renew_alarm` sets the alarm; less than any alarm."""

CHAT_FACTS = ("messages", "turns", "tokens_left", "remaining_tokens", "remaining_turns", "base_url", "api_key")
"""Properties of a chat that a worker can request."""


@dataclass(frozen=True)
class WorkerSetup:
    """The first message to a worker process: the functions that it runs.

    Attributes:
        environment: the argument of :class:`rlox_grpo.GRPO`; None for a process that only runs tools.
        tools: functions, which jobs name by their index.
        limits: limits of the tools, including those that are methods of the environment, as in TRL's environments.
        timeout: maximum seconds of a tool call, or between two turns of an episode.
        reads_pictures: whether the model reads pictures: a tool's result that has one is then an error.
    """

    environment: Any
    tools: tuple[Callable[..., Any], ...]
    limits: ToolLimits
    timeout: float
    reads_pictures: bool = False


@dataclass(frozen=True)
class PlayJob:
    """Play an episode."""

    row: dict[str, Any]
    seed: int


@dataclass(frozen=True)
class CallJob:
    """Call tool number ``tool_index`` of :attr:`WorkerSetup.tools`."""

    tool_index: int
    arguments: dict[str, Any]


class TrainerPipe:
    """The connection to the trainer.

    Attributes:
        timeout: :attr:`WorkerSetup.timeout`.
    """

    def __init__(self, jobs: BinaryIO, answers: BinaryIO) -> None:
        self._jobs, self._answers = jobs, answers
        self._owner, self._trainer = os.getpid(), os.getppid()
        self.timeout = 0.0
        self._alarm = 0.0  # seconds of the alarm that is set; 0.0: none
        self._lock = threading.Lock()  # of the alarm
        self._is_renewed = False
        # A forked process that outlives the worker must not keep the pipe open, because the trainer waits for the end
        # of file.
        os.register_at_fork(after_in_child=self._close)

    def _close(self) -> None:
        for stream in (self._jobs, self._answers):
            os.close(stream.fileno())

    def answer(self, **fields: Any) -> None:
        """Send an answer.

        Raises:
            ValueError: the answer is longer than :data:`LONGEST_ANSWER`.
        """
        if os.getpid() != self._owner:
            os._exit(1)  # a process that the environment forked: the worker itself plays the episode
        line = json.dumps(fields, default=str).encode() + b"\n"
        if len(line) > LONGEST_ANSWER:
            raise ValueError(f"it sends {len(line)} bytes at once: expected at most {LONGEST_ANSWER}")
        self._answers.write(line)
        self._answers.flush()

    def receive(self) -> Any:
        """Wait for a job or for the answer to a request. The process ends if the trainer has ended."""
        self._set_alarm(0.0)
        frame = read_frame(self._jobs)
        if frame is None:
            os._exit(0)
        message = pickle.loads(frame)  # noqa: S301  the trainer's own
        self._set_alarm(self.timeout + ORPHAN_GRACE)
        return message

    def renew_alarm(self) -> None:
        """Set the alarm again and again from now on, as long as the trainer lives.

        The time between two messages has no limit if the environment calls the policy by its endpoint or from a thread
        of its own: the trainer alone knows when it waits for the policy.
        """
        if not self._is_renewed and hasattr(signal, "setitimer"):
            self._is_renewed = True
            threading.Thread(target=self._renew_alarm, name="rlox_grpo alarm", daemon=True).start()

    def _renew_alarm(self) -> None:
        while os.getppid() == self._trainer:
            with self._lock:
                if self._alarm:
                    signal.setitimer(signal.ITIMER_REAL, self._alarm)
            time.sleep(_RENEW_SECONDS)

    def _set_alarm(self, seconds: float) -> None:
        """End the process after some seconds, in case the trainer was killed and cannot end it. 0.0: never."""
        if threading.current_thread() is not threading.main_thread():
            self.renew_alarm()
            return
        with self._lock:
            self._alarm = seconds
            set_alarm(seconds)


class BlockingChat:
    """The chat of a sync function in a worker process: each method asks the trainer and waits for its answer.

    Attributes:
        seed: seed of this episode, for the environment's random numbers.
        tools: tools that run in this process.
        pictures: refuses the pictures of their results; None: the model reads none, and results are text.
    """

    def __init__(self, pipe: TrainerPipe, seed: int, limits: ToolLimits, reads_pictures: bool = False) -> None:
        self.seed = seed
        self.pictures = RefusedPictures(STAYS_IN_WORKER) if reads_pictures else None
        self.tools = Tools((), limits)
        self._pipe = pipe

    def __getattr__(self, name: str) -> Any:
        """Ask for one of :data:`CHAT_FACTS`."""
        if name not in CHAT_FACTS:
            raise AttributeError(f"a chat has no {name!r}")
        if name in ("base_url", "api_key"):
            self._pipe.renew_alarm()
        return self._ask(get=name)

    def turn(
        self, messages: Any = None, *, tools: Any = None, max_new_tokens: int | None = None, stop: Any = ()
    ) -> Reply:
        """See :meth:`rlox_grpo.rollout.episodes.chat.Chat.turn`. ``tools`` cannot be sent to the trainer."""
        if tools is not None:
            raise ValueError(
                "chat.turn(tools=) needs an async environment where turn_timeout or episode_timeout is set: "
                "use GRPO(tools=)"
            )
        reply: Reply = self._ask(turn=messages, max_new_tokens=max_new_tokens, stop=stop)
        return reply

    def complete(self, messages: Any, *, tools: Any = None, max_new_tokens: int | None = None, stop: Any = ()) -> Reply:
        """See :meth:`rlox_grpo.rollout.episodes.chat.Chat.complete`."""
        reply: Reply = self._ask(complete=messages, schemas=tools, max_new_tokens=max_new_tokens, stop=stop)
        return reply

    def call_tools(self, reply: Reply) -> list[dict[str, Any]]:
        """See :meth:`rlox_grpo.rollout.episodes.chat.Chat.call_tools`."""
        calls = [[call.name, dict(call.arguments), call.id] for call in reply.tool_calls]
        messages: list[dict[str, Any]] = self._ask(call_tools=calls, parse_error=reply.parse_error)
        return messages

    def count_calls(self) -> list[float]:
        """Return the counts of :attr:`tools`, which each message to the trainer has: this process may be killed."""
        return [self.tools.calls, self.tools.errors, self.tools.cut, self.tools.seconds]

    def _ask(self, **question: Any) -> Any:
        self._pipe.answer(**question, tools=self.count_calls())
        kind, value = self._pipe.receive()
        if kind == "ended":
            raise EpisodeEnded(*value)
        if kind == "error":
            raise ValueError(value)
        return value


class RemoteChat:
    """:class:`BlockingChat` for an async function."""

    def __init__(self, chat: BlockingChat) -> None:
        self._chat = chat

    async def turn(self, *args: Any, **options: Any) -> Reply:
        """See :meth:`rlox_grpo.rollout.episodes.chat.Chat.turn`."""
        return self._chat.turn(*args, **options)

    async def complete(self, *args: Any, **options: Any) -> Reply:
        """See :meth:`rlox_grpo.rollout.episodes.chat.Chat.complete`."""
        return self._chat.complete(*args, **options)

    async def call_tools(self, reply: Reply) -> list[dict[str, Any]]:
        """See :meth:`rlox_grpo.rollout.episodes.chat.Chat.call_tools`."""
        return await self.tools.answer(reply, self.pictures) if self.tools else self._chat.call_tools(reply)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._chat, name)


def main() -> None:
    """Serve jobs until the trainer closes the stream."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("500")  # out of memory, Linux kills this process before the trainer
    jobs, answers = take_streams()
    pipe = TrainerPipe(jobs, answers)
    try:
        setup: WorkerSetup = pickle.loads(read_frame(jobs) or b"")  # noqa: S301  the trainer's own
        environment = None
        if setup.environment is not None:  # the trainer has checked its tools
            environment = adapt_environment(setup.environment, setup.tools, check_tools=False)
    except BaseException as error:  # noqa: BLE001  the trainer raises it
        pipe.answer(failed=describe_error(error))
        return
    pipe.timeout = setup.timeout
    pipe.answer(ready=True)
    while True:
        try:
            job: PlayJob | CallJob = pipe.receive()
        except Exception as error:  # noqa: BLE001  a column whose class cannot be imported here
            pipe.answer(error=f"its row cannot be read in a worker process: {describe_error(error)}")
            continue
        if isinstance(job, CallJob):
            _call(setup, job, pipe)
        else:
            assert environment is not None
            _play(environment, job, BlockingChat(pipe, job.seed, setup.limits, setup.reads_pictures), pipe)


def _call(setup: WorkerSetup, job: CallJob, pipe: TrainerPipe) -> None:
    try:
        tool = setup.tools[job.tool_index]
        result = tool(**job.arguments)
        if inspect.isawaitable(result):  # a decorated async function may not look like one
            result = run_coroutine(lambda: result)
        if setup.reads_pictures and list_entries(result) is not None:
            pipe.answer(refused=f"{getattr(tool, '__name__', 'a tool')} returned a picture: {STAYS_IN_WORKER}")
            return
        text = show_result(result)
        cut = setup.limits.for_tool(tool).cut_text(text)
        pipe.answer(text=cut.encode("utf-8", "replace").decode(), length=len(text))
    except BaseException as error:  # noqa: BLE001  sys.exit() in a tool fails only its call
        pipe.answer(error=describe_error(error))


def _play(environment: Environment, job: PlayJob, chat: BlockingChat, pipe: TrainerPipe) -> None:
    def answer(**fields: Any) -> None:
        pipe.answer(**fields, tools=chat.count_calls())

    try:
        if environment.function is not None:
            outcome = read_outcome(environment.function(job.row, chat))
        else:
            remote: Any = RemoteChat(chat)
            outcome = read_outcome(run_coroutine(lambda: environment.play(job.row, remote)))
        answer(
            reward=outcome.reward,
            turn_rewards=outcome.turn_rewards,
            stop_reason=outcome.stop_reason,
            metrics=dict(outcome.metrics),
        )
    except EpisodeEnded as ended:
        answer(ended=ended.reason, told=str(ended)[:2000])
    except BaseException as error:  # noqa: BLE001  sys.exit() in an environment ends only its episode
        answer(error=describe_error(error))
