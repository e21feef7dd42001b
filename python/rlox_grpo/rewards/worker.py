"""The worker process: load a reward function, score jobs, and answer in JSON.

Jobs come as pickles from the trainer, which is trusted. Answers go back as lines of JSON, so that whatever a function
did with a model's text, its process can send the trainer numbers and messages and nothing else.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import pickle
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from rlox_grpo.rewards.calls import RewardError, call, read_scores, split_measures

LONGEST_MESSAGE = 2000
_HEADER = 8
ORPHAN_GRACE = 5.0
"""Seconds past its deadline after which a worker whose trainer was killed ends itself."""


@dataclass(frozen=True)
class Job:
    """Completions to score together in one worker.

    Attributes:
        given: What the function can ask for, ``rows`` values of each.
        rows: How many.
        each: Whether the function is called once for each row, with lists of one, instead of once with all.
        timeout: Seconds for each call.
    """

    given: Mapping[str, Any]
    rows: int
    each: bool
    timeout: float


def write_frame(stream: BinaryIO, payload: bytes) -> None:
    """Send bytes with their length before them."""
    stream.write(len(payload).to_bytes(_HEADER, "big"))
    stream.write(payload)
    stream.flush()


def read_frame(stream: BinaryIO) -> bytes | None:
    """What :func:`write_frame` sent, or None at the end of the stream."""
    header = stream.read(_HEADER)
    if len(header) < _HEADER:
        return None
    payload = stream.read(int.from_bytes(header, "big"))
    return payload if len(payload) == int.from_bytes(header, "big") else None


def main() -> None:
    """Serve jobs until the trainer closes the stream."""
    jobs, answers = take_streams()

    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields, allow_nan=False).encode() + b"\n")
        answers.flush()

    try:
        function = pickle.loads(read_frame(jobs) or b"")  # noqa: S301  the trainer's own function
    except BaseException as error:  # noqa: BLE001  reported, and raised over there
        answer(failed=describe_error(error))
        return
    answer(ready=True)
    while (frame := read_frame(jobs)) is not None:
        try:
            job: Job = pickle.loads(frame)  # noqa: S301  the trainer's own job
        except BaseException as error:  # noqa: BLE001
            answer(failed=describe_error(error))
            return
        answer(started=True)
        # If the trainer is killed while a function runs on, nobody else is left to end it.
        set_alarm(job.timeout + ORPHAN_GRACE)
        _serve(function, job, answer)
        set_alarm(0.0)
        answer(done=True)


class _LateError(Exception):
    """A coroutine exceeded its deadline."""


def _serve(function: Any, job: Job, answer: Callable[..., None]) -> None:
    """Answer every row of a job, each as soon as it is known. Coroutines run together, each under its own deadline."""
    waiting: list[tuple[int, int, Awaitable[Any]]] = []
    for first, rows, given in _list_calls(job):
        try:
            result: Any = call(function, given)
        except BaseException as error:  # noqa: BLE001  even sys.exit() in a reward function ends its sample alone
            result = error
        if inspect.isawaitable(result):
            waiting.append((first, rows, result))
        else:
            _settle(first, rows, result, answer)

    async def wait(first: int, rows: int, coroutine: Awaitable[Any]) -> None:
        start = time.monotonic()
        try:
            result: Any = await asyncio.wait_for(coroutine, job.timeout)
        except BaseException as error:  # noqa: BLE001
            late = isinstance(error, asyncio.TimeoutError) and time.monotonic() - start >= job.timeout
            result = _LateError() if late else error
        _settle(first, rows, result, answer)

    async def wait_for_all() -> None:
        await asyncio.gather(*(wait(*each) for each in waiting))

    if waiting:
        asyncio.run(wait_for_all())


def _list_calls(job: Job) -> list[tuple[int, int, Mapping[str, Any]]]:
    """First row, number of rows and arguments of each call."""
    if not job.each:
        return [(0, job.rows, job.given)]
    return [(row, 1, {name: values[row : row + 1] for name, values in job.given.items()}) for row in range(job.rows)]


def _settle(first: int, rows: int, result: Any, answer: Callable[..., None]) -> None:
    """Answer the rows of one call by what it returned, or by the exception that it raised."""
    places = range(first, first + rows)
    if isinstance(result, _LateError):
        for row in places:
            answer(row=row, timeout=True)
        return
    try:
        if isinstance(result, BaseException):
            raise result
        result, measures = split_measures("it", result, rows)
        if measures:
            raise RewardError(
                "it returned metrics beside its scores: a function with a time limit returns the scores alone"
            )
        scores = read_scores("it", result, rows)
    except BaseException as error:  # noqa: BLE001
        for row in places:
            answer(row=row, error=describe_error(error))
    else:
        for row, score in zip(places, scores, strict=True):
            answer(row=row, score=None if math.isnan(score) else score)


def take_streams() -> tuple[BinaryIO, BinaryIO]:
    """Jobs and answers on descriptors of their own: what a function prints goes to the trainer's stderr."""
    jobs, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return jobs, answers


def set_alarm(seconds: float) -> None:
    """Let the process be killed after so many seconds; 0.0: not."""
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds)


def describe_error(error: BaseException) -> str:
    """Type, message (cut) and place of an exception."""
    text = f"{type(error).__name__}: {error}"
    place = ""
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        place = f" ({os.path.basename(code.co_filename)}, line {trace.tb_lineno}, in {code.co_name})"
        trace = trace.tb_next
    return text[:LONGEST_MESSAGE] + place


if __name__ == "__main__":
    sys.exit("this module is started by rlox_grpo.rewards.workers")
