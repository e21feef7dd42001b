"""A pool of worker processes for one reward function, with a deadline for each job.

No library fits this use. pebble starts workers by multiprocessing, which runs a script without a ``__main__`` guard
again in each worker and fails, and it unpickles the answers of workers. loky can only kill the whole pool and not a
single late worker. Here a worker is a plain subprocess, which gets the function from cloudpickle.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlox_grpo.rewards.calls import RewardError, function_name
from rlox_grpo.rewards.import_callable import find_folder
from rlox_grpo.rewards.verdicts import ERROR, OK, TIMEOUT, BoolArray, Float64Array, UInt8Array
from rlox_grpo.rewards.worker import Job, write_frame
from rlox_grpo.types import StepScores

START_SECONDS = 120.0
"""Timeout of a worker's start and imports, in seconds. The start does not count for the timeouts of samples."""

_TICK = 0.02
_LINE = 2**20
"""Bytes of an answer: an error message, or the scores of tens of thousands of steps."""


@dataclass(frozen=True, eq=False)
class Outcomes:
    """Scores and outcomes of a batch.

    Attributes:
        scores: ``float64 [N]``, NaN without a score.
        codes: ``uint8 [N]``, indices of ``OUTCOMES``.
        messages: Error messages by row.
        steps: The scores of steps by row, for a function that returns them.
    """

    scores: Float64Array
    codes: UInt8Array
    messages: dict[int, str]
    steps: dict[int, StepScores] = field(default_factory=dict)

    @property
    def failed(self) -> BoolArray:
        """``bool [N]``: the samples that failed or ran out of time and have no score instead."""
        failed: BoolArray = np.isnan(self.scores) & (self.codes != OK)
        return failed


class Pool:
    """Worker processes of one function: started on demand, reused, ended by ``close``."""

    def __init__(self, function: Any, size: int) -> None:
        self.size = size
        self._function = function
        self._workers: list[Worker] = []
        self._lock = threading.Lock()
        self._payload: bytes | None = None
        # Ends the workers also if close() is never called.
        weakref.finalize(self, end_all, self._workers, os.getpid())

    def start(self) -> None:
        """Start one worker. Raises RewardError if it cannot run the function."""
        with self._lock:
            self._grow(1)
            self._watch([threading.Thread(target=self._workers[0].start, daemon=True)], threading.Event())
            self._workers[0].refuse_broken()

    def run(self, jobs: Sequence[Job], rows: int, *, stop_at_error: bool) -> Outcomes:
        """Run the jobs on the workers, one thread for each worker, and kill workers that exceed a deadline."""
        with self._lock:
            self._grow(min(self.size, len(jobs)))
            outcomes = Outcomes(np.full(rows, np.nan), np.zeros(rows, np.uint8), {})
            waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
            for job in jobs:
                waiting.put(job)
            stop = threading.Event()

            def serve(worker: Worker) -> None:
                while not stop.is_set():
                    try:
                        job = waiting.get_nowait()
                    except queue.Empty:
                        return
                    worker.do(job, outcomes)
                    # One error suffices for on_error="stop": the other workers take no further job.
                    if worker.broken is not None or (stop_at_error and (outcomes.codes[job.rows] == ERROR).any()):
                        stop.set()

            used = self._workers[: len(jobs)]
            self._watch([threading.Thread(target=serve, args=(worker,), daemon=True) for worker in used], stop)
            for worker in used:
                worker.refuse_broken()
            return outcomes

    def close(self) -> None:
        """End every worker."""
        with self._lock:
            end_all(self._workers, os.getpid())

    def _grow(self, size: int) -> None:
        if self._payload is None:
            import cloudpickle  # lazily, so that rules need only NumPy

            try:
                self._payload = cloudpickle.dumps(self._function)
            except Exception as error:
                raise RewardError(
                    f"reward function {function_name(self._function)} cannot be sent to a worker process "
                    f"({type(error).__name__}: {error}): make what it refers to picklable, create it inside the "
                    "function, or leave out the deadline"
                ) from error
        while len(self._workers) < size:
            self._workers.append(Worker(function_name(self._function), self._payload, find_import_path(self._function)))

    def _watch(self, threads: Sequence[threading.Thread], stop: threading.Event) -> None:
        """Join the threads and kill workers past their deadline; on Ctrl-C, kill every worker."""
        for thread in threads:
            thread.start()
        # Threads block in reads of their worker's pipe. A kill closes the pipe and so ends the read.
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(_TICK)
                    for worker in self._workers:
                        worker.expire()
        except BaseException:
            stop.set()
            while any(thread.is_alive() for thread in threads):
                for worker in self._workers:
                    worker.kill()
                threads[0].join(_TICK)
            raise


def find_import_path(function: Any) -> list[str]:
    """Return the import path of a worker: the path of this process, and the folder of the function's module."""
    path = [entry for entry in sys.path if isinstance(entry, str)]
    folder = find_folder(function)
    return path if folder is None or str(folder) in path else [*path, str(folder)]


class Worker:
    """One worker process. Call ``start``, ``do`` and ``ask`` in one thread; ``expire``, ``kill`` and ``end`` in any.

    Attributes:
        broken: The reason why the process cannot run the function, or None.
    """

    def __init__(
        self,
        name: str,
        payload: bytes,
        import_path: Sequence[str],
        entry: str = "rlox_grpo.rewards.worker",
        longest_answer: int = _LINE,
    ) -> None:
        """Create a worker without starting its process.

        Args:
            name: name of the function, for errors.
            payload: the first message to the process, the pickled function.
            import_path: ``sys.path`` of the process.
            entry: module whose ``main`` the process runs.
            longest_answer: size limit of an answer, in bytes. A process that sends more is killed.
        """
        self.broken: str | None = None
        self._name, self._payload, self._import_path = name, payload, list(import_path)
        self._entry, self._longest_answer = entry, longest_answer
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._deadline = math.inf
        self._expired = False

    @property
    def pid(self) -> int | None:
        """The id of the process; None before it was started."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process if it is not running, and wait until it has loaded the function."""
        if self._process is not None and self._process.poll() is None and not self._expired:
            return
        self.end()
        self.broken, self._expired = None, False
        code = f"import sys, json; sys.path[:] = json.loads(sys.argv[1]); from {self._entry} import main; main()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, json.dumps(self._import_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # So Ctrl-C reaches only the trainer, and killpg also kills processes that the function started.
            start_new_session=True,
        )
        self._set_deadline(START_SECONDS)
        try:
            reply = self.ask(self._payload)
        finally:
            self._set_deadline(math.inf)
        if "ready" not in reply:
            late = f"it is not ready after {START_SECONDS:g} s"
            self.broken = str(reply.get("failed") or (late if self._expired else self.describe_end()))
            self.end()

    def do(self, job: Job, outcomes: Outcomes) -> None:
        """Run one job. Afterwards each of its rows has an outcome, or the worker is ``broken``."""
        self.start()
        if self.broken is not None:
            return
        try:
            frame = pickle.dumps(job, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # noqa: BLE001  __reduce__ of the user's objects
            self.broken = f"its arguments cannot be pickled: {type(error).__name__}: {error}"
            return
        left = set(job.rows)
        self._set_deadline(START_SECONDS)  # unpickling the arguments may import modules
        reply = self.ask(frame)
        if "failed" in reply:
            self.broken = f"its arguments cannot be read in the worker: {reply['failed']}"
            self.end()
            return
        if "started" in reply:
            self._set_deadline(job.deadline)
            while "done" not in (reply := self._receive()) and reply:
                row = int(reply["row"])
                if row in left:  # a row of this job, answered once
                    left.remove(row)
                    _note(outcomes, row, reply)
        self._set_deadline(math.inf)
        if not left:
            return
        reply = {"timeout": True} if self._expired else {"error": f"its worker {self.describe_end()}"}
        for row in left:
            _note(outcomes, row, reply)

    def ask(self, payload: bytes) -> dict[str, Any]:
        """Send a frame and return the next answer; empty if the process ended or the answer is invalid."""
        process = self._process
        if process is not None and process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):  # it is dead: _receive returns an empty answer
                write_frame(process.stdin, payload)  # type: ignore[arg-type]
        return self._receive()

    def expire(self) -> None:
        """Kill the process if its deadline has passed."""
        with self._lock:
            if time.monotonic() >= self._deadline:
                self._deadline, self._expired = math.inf, True
                self.kill()

    def refuse_broken(self) -> None:
        """Raise RewardError if the process cannot run the function."""
        if self.broken is not None:
            raise RewardError(f"reward function {self._name} cannot run in a worker process: {self.broken}")

    def end(self) -> None:
        """Kill the process and close its pipes."""
        process, self._process = self._process, None
        if process is None:
            return
        _kill_group(process)
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):  # unwritten bytes have no reader
                    stream.close()
        process.wait()

    def kill(self) -> None:
        """Kill the process. A thread that waits for the worker's answer then gets an empty answer."""
        _kill_group(self._process)

    def _set_deadline(self, seconds: float) -> None:
        with self._lock:
            self._deadline = time.monotonic() + seconds

    def _receive(self) -> dict[str, Any]:
        """Read the next answer; empty if the process ended or the answer is invalid."""
        process = self._process
        if process is None or process.stdout is None:
            return {}
        try:
            answer = json.loads(process.stdout.readline(self._longest_answer) or b"{}")
        except ValueError:
            self.kill()
            return {}
        return answer if isinstance(answer, dict) else {}

    def describe_end(self) -> str:
        """Describe how the process ended. A running process is killed first."""
        process = self._process
        if process is None:
            return "was ended"
        _kill_group(process)
        code = process.wait()
        if code >= 0:
            return f"exited with code {code}"
        try:
            return f"died of {signal.Signals(-code).name}"
        except ValueError:
            return f"died of signal {-code}"


def _note(outcomes: Outcomes, row: int, reply: Mapping[str, Any]) -> None:
    if "timeout" in reply:
        outcomes.codes[row] = TIMEOUT
    elif "error" in reply:
        outcomes.codes[row] = ERROR
        outcomes.messages[row] = str(reply["error"])
    elif "steps" in reply:
        try:
            outcomes.steps[row] = StepScores(*reply["steps"])
        except (TypeError, ValueError, OverflowError) as error:  # model output has taken over the worker
            outcomes.codes[row], outcomes.messages[row] = ERROR, str(error)
        else:
            outcomes.scores[row] = outcomes.steps[row].mean
    elif reply.get("score") is not None:
        outcomes.scores[row] = float(reply["score"])


def end_all(workers: Sequence[Worker], owner: int) -> None:
    """End every worker, unless this process is a fork of the ``owner``."""
    if os.getpid() == owner:
        for worker in workers:
            worker.end()


def _kill_group(process: subprocess.Popen[bytes] | None) -> None:
    if process is None or process.returncode is not None:
        return  # another process may have the number of one that ended
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it ended by itself
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
