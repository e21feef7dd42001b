"""Run a custom reward function in worker processes, with a timeout for each sample."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from rlox_grpo.rewards.calls import RewardError, RewardFn, function_name, select_arguments
from rlox_grpo.rewards.copies import copy_arguments
from rlox_grpo.rewards.reward_model import RewardModel
from rlox_grpo.rewards.verdicts import TIMEOUT, AsyncRule, Rule, check_choice, reduce_settings, to_floats
from rlox_grpo.rewards.worker import Job
from rlox_grpo.rewards.worker_pool import Outcomes, Pool

LONGEST_TIMEOUT = 1e6
"""Longest timeout in seconds (11 days): the operating system cannot wait longer."""

_ASYNC_GRACE = 1.0
"""Seconds after the last timeout at which a worker with async functions is killed: its event loop is blocked."""


@dataclass(frozen=True)
class InWorkers:
    """A reward function in worker processes, which are killed if a sample exceeds the timeout.

    The function is called with one completion at a time (lists of one) and has ``timeout`` seconds for it. With
    ``per="batch"`` the function is called once with the whole batch and has ``timeout`` seconds times the number of
    completions. An async function is called for many completions at the same time, each with its own timeout.

    An endless loop, a crash, ``os._exit`` or a lack of memory affects only its own sample. A sample that exceeds the
    timeout has the outcome ``timeout`` and the score ``timeout_score``. If the function raises an error or the worker
    dies, the outcome is ``error``: the run stops with an error that names the sample, or with ``on_error="none"`` the
    score is None.

    cloudpickle sends the function to the workers, so lambdas, closures and functions of scripts and notebooks work, and
    a script needs no ``if __name__ == "__main__"``. Workers start at the first call and are reused. The workers end
    with :meth:`close`, with the run of the trainer or with the interpreter.

    The class sets a timeout and is not a sandbox. Run code of a model with :class:`~rlox_grpo.rewards.PythonTests` or
    ``rlox_grpo.sandbox``.

    Args:
        function: The reward function.
        timeout: Timeout for one completion, in seconds.
        workers: Number of processes; by default the number of cores, at most 8.
    """

    function: RewardFn
    timeout: float = 5.0
    workers: int | None = None
    per: Literal["sample", "batch"] = "sample"
    timeout_score: float | None = None
    on_error: Literal["stop", "none"] = "stop"
    weight: float | None = None
    _pool: Pool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"function is {self.function!r}, expected a callable")
        if not _is_number(self.timeout) or not 0 < self.timeout <= LONGEST_TIMEOUT:
            raise ValueError(f"timeout is {self.timeout!r}, expected seconds above 0, at most {LONGEST_TIMEOUT:g}")
        if self.workers is not None and (type(self.workers) is not int or self.workers < 1):
            raise ValueError(f"workers is {self.workers!r}, expected a whole number of at least 1")
        if self.timeout_score is not None and not (
            _is_number(self.timeout_score) and math.isfinite(self.timeout_score)
        ):
            raise ValueError(f"timeout_score is {self.timeout_score!r}, expected a finite number or None")
        check_choice("per", self.per, ("sample", "batch"))
        check_choice("on_error", self.on_error, ("stop", "none"))
        if self.weight is None:
            object.__setattr__(self, "weight", getattr(self.function, "weight", 1.0))
        object.__setattr__(self, "__name__", function_name(self.function))
        object.__setattr__(self, "_pool", Pool(self.function, self.workers or min(8, os.cpu_count() or 1)))

    __reduce__ = reduce_settings  # a copy has workers of its own

    def __call__(self, prompts: Any = None, completions: Sequence[Any] = (), **columns: Any) -> list[float | None]:
        """Score a batch, called as by TRL. Only columns with one value for each completion are used."""
        arguments = {"completions": completions, **({} if prompts is None else {"prompts": prompts}), **columns}
        outcomes = self.outcomes(
            {name: values for name, values in arguments.items() if _is_column(values, completions)}
        )
        return to_floats(outcomes.scores)

    def outcomes(self, arguments: Mapping[str, Any]) -> Outcomes:
        """Score a batch.

        ``arguments`` has ``completions`` and the other arguments that the function may have, one value for each
        completion.

        Raises:
            RewardError: The function requires an argument that is not given, or cannot run in a worker. Or, with its
                ``row``, a completion has the outcome ``error``, with ``on_error="stop"``.
        """
        rows = len(arguments["completions"])
        arguments = copy_arguments(
            {"prompts": [None] * rows, **arguments}
        )  # else completions in one worker share values
        select_arguments(self.function, arguments)
        is_async = is_coroutine_function(self.function)
        timeout = min(LONGEST_TIMEOUT, self.timeout * (rows if self.per == "batch" else 1))
        deadline = timeout + (_ASYNC_GRACE if is_async else 0.0)
        size = 1
        if self.per == "batch":
            size = rows
        elif is_async:  # a part for each worker
            size = math.ceil(rows / self._pool.size)
        jobs = []
        for start in range(0, rows, max(size, 1)):
            chunk = {name: values[start : start + size] for name, values in arguments.items()}
            jobs.append(Job(range(rows)[start : start + size], chunk, self.per == "sample", timeout, deadline))
        outcomes = self._pool.run(jobs, rows, stop_at_error=self.on_error == "stop")
        if self.timeout_score is not None:
            outcomes.scores[outcomes.codes == TIMEOUT] = self.timeout_score
        if self.on_error == "stop" and outcomes.messages:
            row = min(outcomes.messages)
            raise RewardError(f"reward function {function_name(self)}: {outcomes.messages[row]}", row)
        return outcomes

    def start(self) -> None:
        """Start one worker, to check that the function can be sent and imported.

        Raises:
            RewardError: The function cannot run in a worker.
        """
        self._pool.start()

    def close(self) -> None:
        """End the workers. The next call starts new workers."""
        self._pool.close()


def in_workers(
    functions: Sequence[RewardFn], timeout: float | None, workers: int | None, on_error: Literal["stop", "none"]
) -> list[RewardFn]:
    """With a ``timeout``, wrap functions in :class:`InWorkers`, except rules, judges, reward models, ``InWorkers``."""
    if timeout is None:
        return list(functions)
    return [
        function
        if isinstance(function, (Rule, AsyncRule, InWorkers, RewardModel))
        else InWorkers(function, timeout, workers=workers, on_error=on_error)
        for function in functions
    ]


@contextmanager
def closing_workers(functions: Sequence[RewardFn]) -> Iterator[None]:
    """End the workers of the functions and rules after the block. A later call starts new ones."""
    try:
        yield
    finally:
        for function in functions:
            if isinstance(function, (InWorkers, Rule)) and hasattr(function, "close"):
                function.close()


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_column(values: Any, completions: Sequence[Any]) -> bool:
    return hasattr(values, "__len__") and not isinstance(values, str) and len(values) == len(completions)


def is_coroutine_function(function: Any) -> bool:
    """Whether a call returns a coroutine: for async functions, their partials, and objects with async ``__call__``."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
