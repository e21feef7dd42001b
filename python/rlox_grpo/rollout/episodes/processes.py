"""Run sync environments and tools in worker processes, which a deadline can kill."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import pickle
import sys
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

import numpy as np

from rlox_grpo.environments import EpisodeEnded, Outcome, Reply, ToolCall
from rlox_grpo.errors import ConfigError
from rlox_grpo.rewards.worker_pool import START_SECONDS, Worker, end_all, find_import_path
from rlox_grpo.rollout.episodes.chat import Chat
from rlox_grpo.rollout.episodes.pictures import RefusedPictureError
from rlox_grpo.rollout.episodes.process_main import CHAT_FACTS, LONGEST_ANSWER, CallJob, PlayJob, WorkerSetup
from rlox_grpo.rollout.episodes.tools import ToolLimits

_ENTRY = "rlox_grpo.rollout.episodes.process_main"
_ABANDON_SECONDS = 1.0
"""Seconds to wait for the pipe of a killed worker, because a process that the worker started may keep it open."""

LARGEST_GROWTH = 512 * 2**20
"""A worker process that has grown by more bytes since its first use is replaced: its environment leaks memory."""


class EpisodeWorkerError(RuntimeError):
    """An environment or a tool failed in its worker process.

    Attributes:
        worker_message: the worker's message.
        never_started: whether the process could not start, so that no call of the policy can succeed.
    """

    def __init__(self, message: str, *, never_started: bool = False) -> None:
        super().__init__(message)
        self.worker_message, self.never_started = message, never_started


class ProcessPool:
    """Worker processes of one environment, or of the tools: started on demand, lent to one user at a time, reused."""

    def __init__(self, name: str, setup: WorkerSetup, size: int) -> None:
        """Prepare at most ``size`` processes; none is started yet.

        Raises:
            ConfigError: ``setup`` cannot be pickled.
        """
        import cloudpickle

        try:
            self._payload = cloudpickle.dumps(setup)
        except Exception as error:
            raise ConfigError(
                f"{name} cannot be sent to a worker process ({type(error).__name__}: {error}): make the objects that "
                "it uses picklable, create them inside it, make it async, or leave out the timeout"
            ) from error
        self._name, self._size = name, size
        function = setup.environment if setup.environment is not None else setup.tools[0]
        self._import_path = find_import_path(function) if callable(function) else list(sys.path)
        self._workers: list[Worker] = []
        self._idle: list[Worker] = []
        self._lock = threading.Lock()  # of both lists: with async_steps, close() may be called in another thread
        self._closed = 0
        self._first_sizes: weakref.WeakKeyDictionary[Worker, int] = weakref.WeakKeyDictionary()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._finalizer = weakref.finalize(self, end_all, self._workers, os.getpid())

    @contextlib.asynccontextmanager
    async def lend(self) -> AsyncIterator[LentWorker]:
        """Lend a ready process for the block, or wait for one. At the end, a process that is not ``clean`` is killed.

        Raises:
            EpisodeWorkerError: the process cannot run the environment or the tools.
        """
        while (worker := self._take()) is None:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():  # it had the turn: give it to the next
                    self._wake_next()
                raise
        lent, closed = LentWorker(worker), self._closed
        try:
            await lent.start()
            yield lent
        finally:
            with self._lock:
                stays_open = lent.clean and closed == self._closed and not self._leaks(worker)
                if stays_open:
                    self._idle.append(worker)
                else:
                    self._workers.remove(worker)
            if not stays_open:
                lent.end()
            self._wake_next()

    def close(self) -> None:
        """End the idle processes now, and the lent ones when they are returned. Later episodes start new processes."""
        with self._lock:
            self._closed += 1
            idle, self._idle[:] = [*self._idle], []
            for worker in idle:
                self._workers.remove(worker)
        end_all(idle, os.getpid())

    def _take(self) -> Worker | None:
        """Return an idle process, a new one, or None if all are lent."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
            if len(self._workers) >= self._size:
                return None
            worker = Worker(self._name, self._payload, self._import_path, _ENTRY, LONGEST_ANSWER + 1)
            self._workers.append(worker)
            return worker

    def _leaks(self, worker: Worker) -> bool:
        """Whether a process has grown by more than :data:`LARGEST_GROWTH` since the end of its first use."""
        size = read_memory(worker.pid)
        return size - self._first_sizes.setdefault(worker, size) > LARGEST_GROWTH

    def _wake_next(self) -> None:
        """Give the turn to the first waiting user."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return


class LentWorker:
    """A process lent for one episode or one call.

    Attributes:
        clean: whether the process can be reused. The borrower of the process sets this.
    """

    def __init__(self, worker: Worker) -> None:
        self.clean = False
        self._worker = worker
        self._work: Future[Any] | None = None

    async def start(self) -> None:
        """Wait until the process is ready. Raises EpisodeWorkerError if it fails to start."""
        try:
            await asyncio.wait_for(self._do(self._worker.start), START_SECONDS)
        except (asyncio.TimeoutError, TimeoutError):
            message = f"its worker process is not ready after {START_SECONDS:g} s"
            raise EpisodeWorkerError(message, never_started=True) from None
        if self._worker.broken is not None:
            message = f"it cannot run in a worker process: {self._worker.broken}"
            raise EpisodeWorkerError(message, never_started=True)

    async def ask(self, job: Any) -> dict[str, Any]:
        """Send a job or the answer to a request, and wait for the worker's answer.

        Raises:
            EpisodeWorkerError: ``job`` cannot be pickled, or the process ended without an answer.
        """
        try:
            payload = pickle.dumps(job, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            raise EpisodeWorkerError(f"the row cannot be pickled: {type(error).__name__}: {error}") from error
        answer: dict[str, Any] = await self._do(lambda: self._worker.ask(payload))
        if not answer:
            raise EpisodeWorkerError(f"its worker process {self._worker.describe_end()}")
        return answer

    def end(self) -> None:
        """Kill the process and all processes that it started."""
        self._worker.kill()
        if self._work is None or not wait([self._work], _ABANDON_SECONDS).not_done:
            self._worker.end()

    async def _do(self, work: Callable[[], Any]) -> Any:
        """Run blocking work in a daemon thread, which does not delay the end of the interpreter."""
        future = self._work = Future()
        future.set_running_or_notify_cancel()  # the work goes on if whoever waits for it is cancelled

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001  raised by whoever waits
                future.set_exception(error)

        threading.Thread(target=run, name="episode worker", daemon=True).start()
        return await asyncio.wrap_future(future)


def read_memory(pid: int | None) -> int:
    """Return the resident memory of a process in bytes; 0 where the system does not say."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


async def play_in_process(pool: ProcessPool, row: Mapping[str, Any], chat: Chat) -> Outcome:
    """Play an episode whose environment runs in a process of ``pool``.

    Raises:
        EpisodeWorkerError: the environment raised, its process died, or it sent an invalid message.
        EpisodeEnded: a limit ended the episode, and the environment did not catch the exception.
    """
    chat.pause()  # the deadline starts when there is a process
    async with pool.lend() as lent:
        chat.resume()
        counted: Sequence[float] = (0, 0, 0, 0.0)  # of the calls in the process so far
        job: Any = PlayJob(dict(row), chat.seed)
        while True:
            answer = await lent.ask(job)
            call_counts = answer.get("tools", counted)
            calls, errors, cut, seconds = (now - before for now, before in zip(call_counts, counted, strict=True))
            chat.tools.add(int(calls), int(errors), int(cut), float(seconds))
            counted = call_counts
            if {"stop_reason", "ended", "error"} & answer.keys():
                break
            if chat.ended is not None:  # the environment caught EpisodeEnded and asks again: kill its process
                raise EpisodeEnded(chat.ended)
            job = await _serve(chat, answer)
        lent.clean = True
        if "error" in answer:
            raise EpisodeWorkerError(str(answer["error"]))
        if "ended" in answer:
            raise EpisodeEnded(str(answer["ended"]), str(answer.get("told", "")))
        return Outcome(answer["reward"], answer["turn_rewards"], answer["stop_reason"], answer["metrics"])


class ToolProcesses:
    """Worker processes for the sync functions of ``tools``."""

    def __init__(
        self, tools: Sequence[Callable[..., Any]], limits: ToolLimits, size: int, reads_pictures: bool = False
    ) -> None:
        """Prepare at most ``size`` processes. Raises ConfigError if the tools cannot be pickled."""
        assert limits.timeout is not None
        self._sync = [function for function in tools if not inspect.iscoroutinefunction(function)]
        self._timeout = limits.timeout
        setup = WorkerSetup(None, tuple(self._sync), limits, limits.timeout, reads_pictures)
        self._pool = ProcessPool("tools", setup, size) if self._sync else None

    def reach(self, function: Callable[..., Any]) -> bool:
        """Whether a deadline can stop ``function``."""
        return inspect.iscoroutinefunction(function) or function in self._sync

    async def call(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> tuple[str, int]:
        """Call a sync tool. Return its result, cut to ``max_chars`` characters, and the length before the cut.

        Raises:
            TimeoutError: the call took too long; its process is killed.
            EpisodeWorkerError: the tool raised, or its process died.
            RefusedPictureError: the tool returned a picture, which a worker process does not send.
        """
        assert self._pool is not None
        job = CallJob(self._sync.index(function), dict(arguments))
        async with self._pool.lend() as lent:
            answer = await asyncio.wait_for(lent.ask(job), self._timeout)
            lent.clean = True
            if "refused" in answer:
                raise RefusedPictureError(str(answer["refused"]))
            if "error" in answer:
                raise EpisodeWorkerError(str(answer["error"]))
            return str(answer["text"]), int(answer["length"])

    def close(self) -> None:
        """End the processes; later calls start new ones."""
        if self._pool is not None:
            self._pool.close()


async def _serve(chat: Chat, asked: Mapping[str, Any]) -> tuple[str, Any]:
    """Serve a worker's request. Return ``"value"``, ``"ended"`` or ``"error"``, and the answer."""
    try:
        limits = {name: asked[name] for name in ("max_new_tokens", "stop") if name in asked}
        if "turn" in asked:
            return "value", await chat.turn(asked["turn"], **limits)
        if "complete" in asked:
            return "value", await chat.complete(asked["complete"], tools=asked["schemas"], **limits)
        if "call_tools" in asked:
            calls = tuple(ToolCall(str(name), dict(arguments), str(id)) for name, arguments, id in asked["call_tools"])
            none = np.empty(0, dtype=np.int64)
            reply = Reply("", "", None, calls, "stop", none, none.astype(np.float32), parse_error=asked["parse_error"])
            return "value", await chat.call_tools(reply)
        if asked.get("get") in CHAT_FACTS:
            return "value", getattr(chat, asked["get"])
    except EpisodeEnded as ended:
        return "ended", (ended.reason, str(ended))
    except (ValueError, TypeError) as error:
        return "error", str(error)
    raise EpisodeWorkerError(f"its worker process sent an unknown request: {str(dict(asked))[:200]}")
