"""Score answers to tasks of reasoning_gym by the task's own scorer, in bounded worker processes."""

from __future__ import annotations

import functools
import json
import logging
import math
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import numpy as np

import rlox_grpo._native as _native
from rlox_grpo.errors import ConfigError, import_extra, suggest_nearest
from rlox_grpo.groups import RIGHT
from rlox_grpo.rewards.columns import Columns, read_column, read_texts
from rlox_grpo.rewards.verdicts import (
    NO_ANSWER,
    OK,
    TIMEOUT,
    UNDECIDED,
    Verdicts,
    call_rule,
    check_undecided,
    reduce_settings,
    shorten,
)
from rlox_grpo.rewards.workers import InWorkers

logger = logging.getLogger(__name__)

AnswerForm = Literal["tag", "box", "number", "text"]

_EVAL = "its scorer evaluates the answer as Python code"
_SYMPY = "its scorer gives the answer to sympy's parse_expr, which evaluates it as Python code"

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "binary_matrix": _EVAL,
        "n_queens": _EVAL,
        "spiral_matrix": _EVAL,
        "string_insertion": _EVAL,
        "countdown": f"{_SYMPY}; use task = 'countdown' and the reward 'countdown' of this library",
        "intermediate_integration": _SYMPY,
        "polynomial_multiplication": _SYMPY,
        "puzzle24": _SYMPY,
        "simple_integration": _SYMPY,
        "bitwise_arithmetic": "its scorer evaluates the row's problem as Python code, and rows may come from a file",
        "game_of_life_halting": "its scorer gives every answer the full score",
        "composite": "name its tasks instead, as a mixture",
    }
)
"""Tasks of reasoning_gym 0.1.25 that are refused → the reason. Every scorer of that version was read for this list."""

_LITERAL_LIST = re.compile(r"\[[0-9eE+\-.', ]*\]")
"""The text that number_sorting evaluates, its own gold. Such a text has no names, calls or powers."""


def make_dataset(task: str, arguments: Mapping[str, Any], *, seed: int = 0, size: int = 1) -> Any:
    """Create the dataset of a task.

    Args:
        task: name of the task in reasoning_gym.
        arguments: fields of the task's configuration, except ``seed`` and ``size``.
        seed: the seed of the dataset. Most tasks draw problem i from ``seed + i``.
        size: number of problems.

    Raises:
        ConfigError: the task is refused or unknown, it has no such argument, or it refuses a value.
        ImportError: reasoning_gym is not installed.
    """
    refuse_tasks([task])
    tasks = _import_tasks()
    if task not in tasks:
        raise ConfigError(
            f"reasoning_gym has no task {task!r}{suggest_nearest(task, sorted(set(tasks) - set(REFUSED)))}"
        )
    make, configuration = tasks[task]
    names = [option.name for option in fields(configuration) if option.name not in ("seed", "size")]
    for name in arguments:
        if name not in names:
            raise ConfigError(
                f"the task {task} has no argument {name!r}{suggest_nearest(name, names)}; its arguments are "
                f"{', '.join(names) or 'none'}"
            )
    try:
        # TOML and JSON have lists only.
        defaults = {option.name: option.default for option in fields(configuration) if option.default is not MISSING}
        values = {
            name: tuple(value) if isinstance(defaults.get(name), tuple) and isinstance(value, list) else value
            for name, value in arguments.items()
        }
        return make(configuration(seed=seed, size=size, **values))
    except Exception as error:  # the task's own checks: assertions, and any error for a value of another type
        raise ConfigError(f"the task {task} refuses {dict(arguments)}: {type(error).__name__}: {error}") from error


def _import_tasks() -> Mapping[str, Any]:
    """Return the tasks of reasoning_gym by name, each with its classes of datasets and of configurations."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of cellpylib, which it imports
        import_extra("reasoning_gym", "reasoning_gym", "reasoning-gym")
        from reasoning_gym.factory import DATASETS
    tasks: Mapping[str, Any] = DATASETS
    return tasks


def refuse_tasks(tasks: Sequence[str]) -> None:
    """Raise ConfigError if one of the tasks is in :data:`REFUSED`."""
    for task in dict.fromkeys(tasks):
        if task in REFUSED:
            raise ConfigError(f"the task {task} of reasoning_gym is refused: {REFUSED[task]}")


def pack(value: Any) -> Any:
    """Return plain data in a form that JSON keeps: tuples and dicts get tags.

    JSON has no tuples, and only text as keys of objects.

    Raises:
        ConfigError: the data hold something other than dicts, lists, tuples, texts, numbers, bools and None.
    """
    if isinstance(value, Mapping):
        return {"dict": [[pack(key), pack(entry)] for key, entry in value.items()]}
    if isinstance(value, tuple):
        return {"tuple": [pack(entry) for entry in value]}
    if isinstance(value, list):
        return [pack(entry) for entry in value]
    if value is None or isinstance(value, (str, int, float)):
        return value
    raise ConfigError(f"it holds the {type(value).__name__} {shorten(value)}, which JSON cannot store")


def unpack(value: Any) -> Any:
    """Return the data that :func:`pack` packed."""
    if isinstance(value, dict):
        if "dict" in value:
            return {unpack(key): unpack(entry) for key, entry in value["dict"]}
        return tuple(unpack(entry) for entry in value["tuple"])
    return [unpack(entry) for entry in value] if isinstance(value, list) else value


@dataclass(frozen=True)
class ReasoningGym:
    """The score of the task's own ``score_answer``, usually 0 to 1; 0.0 without an answer.

    The answer is searched after the last ``</think>``, in the form that the row names: in the last closed ``<answer>``
    (``tag``), in the last box (``box``), the last number (``number``), or the whole text (``text``). Scorers run in
    worker processes, with ``timeout`` seconds for each answer. An answer whose scorer runs out of time, raises an error
    or tries to evaluate code is ``undecided``: a warning reports it, and it has the score ``undecided`` (None: the
    sample failed and has no score). Tasks whose scorers evaluate the answer are refused (:data:`REFUSED`).

    The metric ``rewards/reasoning_gym/<task>_accuracy`` is the share of a task's answers with a score of at least 1.

    Columns: those of :func:`rlox_grpo.prompts.tasks.reasoning_gym.make_rows`: ``task``, ``question``, ``answer``,
    ``answer_form`` and ``entry``.

    Args:
        task: the only task that rows may have; None: any.
        timeout: timeout for one answer, in seconds.
        workers: number of worker processes; by default the number of cores, at most 8.
    """

    task: str | None = None
    timeout: float = 5.0
    workers: int | None = None
    undecided: float | None = None
    weight: float = 1.0
    __name__: ClassVar[str] = "reasoning_gym"
    _scorer: InWorkers = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        refuse_tasks([] if self.task is None else [self.task])
        check_undecided(self.undecided)
        scorer = InWorkers(Scorer(), self.timeout, workers=self.workers, on_error="none")
        object.__setattr__(self, "_scorer", scorer)

    __reduce__ = reduce_settings  # a copy has workers of its own

    def verdicts(self, completions: Sequence[Any], columns: Columns) -> Verdicts:
        """Score a batch. A ValueError names the column, row and value that the rule cannot use."""
        name, rows = self.__name__, len(completions)
        table = {column: list(read_column(columns, column, rows, name)) for column in _COLUMNS}
        _check_columns(table, self.task, name)
        texts = read_texts(completions, name)
        answers = [_native.extract_by_form(*pair) for pair in zip(texts, table["answer_form"], strict=True)]
        stated = [row for row, answer in enumerate(answers) if answer is not None]
        scores, statuses = np.zeros(rows), np.full(rows, NO_ANSWER, np.uint8)
        if stated:
            arguments = {column: [values[row] for row in stated] for column, values in table.items()}
            outcomes = self._scorer.outcomes({**arguments, "completions": [answers[row] for row in stated]})
            scores[stated] = outcomes.scores
            statuses[stated] = np.where(outcomes.codes == OK, OK, UNDECIDED)
            for first in np.flatnonzero(outcomes.codes)[:1].tolist():
                row = stated[first]
                late = int((outcomes.codes == TIMEOUT).sum())
                logger.warning(
                    "%s: of %d answers %d ran out of time and the scorer failed for %d; the first: %s; the task is %s, "
                    "the answer %s",
                    *(name, len(stated), late, int((outcomes.codes != OK).sum()) - late),
                    outcomes.messages.get(first, f"it took more than {self.timeout:g} s"),
                    *(table["task"][row], shorten(answers[row])),
                )
            scores[statuses == UNDECIDED] = np.nan if self.undecided is None else self.undecided
        return Verdicts(scores, statuses, _measure_tasks(table["task"], scores))

    __call__ = call_rule

    def close(self) -> None:
        """End the worker processes. The next call starts new ones."""
        self._scorer.close()


_COLUMNS = ("task", "question", "answer", "answer_form", "entry")


def _check_columns(table: Mapping[str, Sequence[Any]], only: str | None, name: str) -> None:
    for column, values in table.items():
        for row, value in enumerate(values):
            if not isinstance(value, str) and not (column == "answer" and value is None):
                raise ValueError(
                    f"{name}: {column}[{row}] is {shorten(value)}, expected text; make the rows by make_rows"
                )
    refuse_tasks(table["task"])
    for row, (task, form) in enumerate(zip(table["task"], table["answer_form"], strict=True)):
        if only is not None and task != only:
            raise ValueError(f"{name}: task[{row}] is {task!r}, and this reward is for {only!r} alone")
        if form not in _native.answer_forms():
            raise ValueError(
                f"{name}: answer_form[{row}] is {form!r}, expected one of {', '.join(_native.answer_forms())}"
            )


def _measure_tasks(tasks: Sequence[str], scores: Any) -> dict[str, Any]:
    """Return for each task 1.0 for its right answers and 0.0 for the others, ``float64 [N]``; NaN for other tasks."""
    right = np.where(np.isnan(scores), np.nan, scores >= RIGHT)
    return {f"{task}_accuracy": np.where(np.array(tasks) == task, right, np.nan) for task in sorted(set(tasks))}


class Scorer:
    """The function of the worker processes. A copy imports reasoning_gym before its first job."""

    __name__ = "reasoning_gym"

    def __reduce__(self) -> tuple[Any, ...]:
        return _load_scorer, ()

    def __call__(
        self,
        completions: Sequence[str],
        task: Sequence[str],
        question: Sequence[str],
        answer: Any,
        entry: Sequence[str],
    ) -> list[float]:
        """Score answers.

        Raises:
            ValueError: the scorer returned something other than a finite number.
            RuntimeError: the scorer tried to compile text as Python code.
        """
        scores = []
        for text, *row in zip(completions, task, question, answer, entry, strict=True):
            name, problem, gold, packed = row
            stored = json.loads(packed)
            dataset = _make_cached(name, json.dumps(stored["arguments"], sort_keys=True))
            row_entry = {"question": problem, "answer": gold, "metadata": unpack(stored["metadata"])}
            with refusing_code(name):
                score = dataset.score_answer(text, row_entry)
            if not math.isfinite(score):
                raise ValueError(f"the scorer of {name} returned {score!r}")
            scores.append(float(score))
        return scores


def _load_scorer() -> Scorer:
    _import_tasks()
    if not _guard.installed:
        sys.addaudithook(_guard.refuse)
        _guard.installed = True
    return Scorer()


@functools.cache
def _make_cached(task: str, arguments: str) -> Any:
    return make_dataset(task, json.loads(arguments))


class _CodeGuard:
    """Refuses to compile text while a scorer runs, whatever the scorer does with the exception."""

    def __init__(self) -> None:
        self.installed, self.scoring, self.refused = False, False, False

    def refuse(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "compile" or not self.scoring:
            return
        source, file = arguments
        is_import = isinstance(file, str) and file.endswith(".py")  # eval and exec give "<string>"
        text = source.decode("utf-8", "replace") if isinstance(source, bytes) else source
        if not is_import and not (isinstance(text, str) and _LITERAL_LIST.fullmatch(text)):
            self.refused = True
            raise RuntimeError("a scorer must not evaluate code")


_guard = _CodeGuard()


@contextmanager
def refusing_code(task: str) -> Iterator[None]:
    """Raise RuntimeError if the block compiled text as Python code, even if the block swallowed the guard's exception.

    The guard is an audit hook, which only worker processes install. The guard protects against a scorer of a version of
    reasoning_gym that was not reviewed. The guard is not a sandbox: it stops the evaluation before any of the text
    runs.
    """
    _guard.scoring, _guard.refused = True, False
    try:
        yield
    finally:
        _guard.scoring = False
        if _guard.refused:
            raise RuntimeError(f"the scorer of {task} tried to evaluate text as Python code")
