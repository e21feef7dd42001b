"""The worker process of a reward function: it loads the function, scores jobs and answers in JSON.

Jobs are pickles of the trainer, which is trusted. Answers are lines of JSON and are never unpickled: model output that
takes over the worker can send the trainer only numbers and messages.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import pickle
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from rlox_grpo import errors
from rlox_grpo.rewards.calls import RewardError, call, read_scores, split_measures
from rlox_grpo.rewards.steps import split_steps

LONGEST_MESSAGE = 2000
_HEADER = 8
ORPHAN_GRACE = 5.0
"""Seconds after its deadline at which a worker ends itself, in case the trainer was killed."""


@dataclass(frozen=True)
class Job:
    """Completions that one worker scores.

    Attributes:
        rows: Rows of the batch.
        arguments: Arguments of the function by name, each with one value for each of ``rows``.
        each: Whether to call the function once for each row, with lists of one value, instead of once with all.
        timeout: Timeout of each call, in seconds.
        deadline: Seconds after which the worker is killed.
    """

    rows: range
    arguments: Mapping[str, Any]
    each: bool
    timeout: float
    deadline: float


def write_frame(stream: BinaryIO, payload: bytes) -> None:
    """Write the length of ``payload``, then its bytes."""
    stream.write(len(payload).to_bytes(_HEADER, "big"))
    stream.write(payload)
    stream.flush()


def read_frame(stream: BinaryIO) -> bytes | None:
    """Read the bytes of one :func:`write_frame`; None at the end of the stream."""
    header = stream.read(_HEADER)
    if len(header) < _HEADER:
        return None
    payload = stream.read(int.from_bytes(header, "big"))
    return payload if len(payload) == int.from_bytes(header, "big") else None


def main() -> None:
    """Process jobs until the trainer closes the stream."""
    jobs, answers = take_streams()

    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields, allow_nan=False).encode() + b"\n")
        answers.flush()

    try:
        function = pickle.loads(read_frame(jobs) or b"")  # noqa: S301  the trainer's own function
    except BaseException as error:  # noqa: BLE001  the trainer raises it
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
        # Normally the trainer kills a late worker. This ends the worker if the trainer itself was killed.
        set_alarm(job.timeout + ORPHAN_GRACE)
        _serve(function, job, answer)
        set_alarm(0.0)
        answer(done=True)


def _serve(function: Any, job: Job, answer: Callable[..., None]) -> None:
    """Score a job and answer each row as soon as its score is known. Coroutines run together, each with its timeout."""
    waiting: list[tuple[range, Awaitable[Any]]] = []
    for rows, arguments in _list_calls(job):
        try:
            result: Any = call(function, arguments)
        except BaseException as error:  # noqa: BLE001  also sys.exit() must cost only this sample
            result = error
        if inspect.isawaitable(result):
            waiting.append((rows, result))
        else:
            _settle(rows, result, answer)

    async def catch_exit(coroutine: Awaitable[Any]) -> Any:
        try:
            return await coroutine
        except (SystemExit, GeneratorExit) as error:  # would end the event loop, and with it the other samples
            return error

    async def wait(rows: range, coroutine: Awaitable[Any]) -> None:
        start = time.monotonic()
        try:
            result: Any = await asyncio.wait_for(catch_exit(coroutine), job.timeout)
        except BaseException as error:  # noqa: BLE001
            if isinstance(error, asyncio.TimeoutError) and time.monotonic() - start >= job.timeout:
                for row in rows:
                    answer(row=row, timeout=True)
                return
            result = error
        _settle(rows, result, answer)

    async def wait_for_all() -> None:
        await asyncio.gather(*(wait(*each) for each in waiting))

    if waiting:
        asyncio.run(wait_for_all())


def _list_calls(job: Job) -> list[tuple[range, Mapping[str, Any]]]:
    """Return the rows and the arguments of each call."""
    if not job.each:
        return [(job.rows, job.arguments)]
    return [
        (job.rows[index : index + 1], {name: values[index : index + 1] for name, values in job.arguments.items()})
        for index in range(len(job.rows))
    ]


def _settle(rows: range, result: Any, answer: Callable[..., None]) -> None:
    """Answer the rows of one call with its scores, or with the error that it raised."""
    try:
        if isinstance(result, BaseException):
            raise result
        result, measures = split_measures("it", result, len(rows))
        if measures:
            raise RewardError(
                "it returned metrics beside its scores: a function with a time limit returns the scores alone"
            )
        result, steps = split_steps("it", result)
        scores = read_scores("it", result, len(rows))
    except BaseException as error:  # noqa: BLE001
        for row in rows:
            answer(row=row, error=describe_error(error))
    else:
        for row, score, row_steps in zip(rows, scores, steps or [None] * len(scores), strict=True):
            plain = {} if row_steps is None else {"steps": [row_steps.ends, row_steps.scores]}
            answer(row=row, score=None if math.isnan(score) else score, **plain)


def take_streams() -> tuple[BinaryIO, BinaryIO]:
    """Return the streams of jobs and answers. Standard output is then redirected to the trainer's stderr."""
    jobs, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return jobs, answers


def set_alarm(seconds: float) -> None:
    """Let the kernel kill this process after a number of seconds; 0.0 cancels that."""
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds)


def describe_error(error: BaseException) -> str:
    """Return the type, the truncated message and the line of an error."""
    return errors.describe_error(error)[:LONGEST_MESSAGE] + errors.locate_error(error)
