"""Rows of the generated tasks of reasoning_gym, split into training and held-out rows.

A row has the columns ``prompt`` (chat messages), ``question``, ``answer``, ``task``, ``answer_form`` and ``entry``,
JSON text with what the task's scorer needs. :class:`~rlox_grpo.rewards.reasoning_gym.ReasoningGym` reads them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import numpy as np

from rlox_grpo.errors import ConfigError, suggest_nearest
from rlox_grpo.rewards.reasoning_gym import AnswerForm, make_dataset, pack
from rlox_grpo.rewards.worker import take_streams

logger = logging.getLogger(__name__)

Row = dict[str, Any]

PREFIX = "reasoning_gym:"
"""Beginning of the name of a task as data, ``"reasoning_gym:chain_sum"``."""

SIZE, HELD_OUT, SEED = 1000, 100, 0

INSTRUCTIONS: Mapping[str, str] = {
    "tag": "Reason step by step. Then write the final answer alone between <answer> and </answer>.",
    "box": "Reason step by step. Then write the final answer in \\boxed{}.",
    "number": "Reason step by step. The last number that you write counts as the answer.",
    "text": "Reply with the answer alone.",
}
"""What the prompt says about the answer, by its form."""

_TEMPLATE_FORMS = {
    "boxed": "box",
    "r1_think": "tag",
    "lm_book": "tag",
    "rl_from_scratch": "tag",
    "verl_gsm8k": "number",
    "verl_dapo": "number",
}
"""Prompt templates → the ``answer_form`` of the answer that they ask for."""

_HELD_OUT_SEED = 2**31
"""Added to the seed of held-out problems. Seeds of both parts stay below 2**32, the limit of NumPy's generators."""

_CHUNK = 500
"""Problems of one data set. Some tasks prepare all problems when the data set is created."""

_PATIENCE = 1000
"""Consecutive draws without a new problem after which a task counts as exhausted."""


def make_rows(
    tasks: str | Mapping[str, Mapping[str, Any]],
    *,
    size: int = SIZE,
    held_out: int = HELD_OUT,
    seed: int = SEED,
    answer_form: AnswerForm = "tag",
) -> tuple[list[Row], list[Row]]:
    """Generate training rows and held-out rows. All their problems are distinct, even across the two lists.

    Training problems are those of reasoning_gym with this ``seed``, held-out problems those with ``seed + 2**31``;
    a training problem that occurs among the held-out ones is left out. The same arguments give the same rows on any
    machine with the same version of reasoning_gym. The rows are generated in a separate process, because some tasks
    depend on the order of sets or on global random numbers, which are fixed there.

    Args:
        tasks: the name of a task, or a mixture: name → arguments of the task, and ``weight``, by default 1. The numbers
            of rows of the tasks are proportional to their weights.
        size: number of training rows.
        held_out: number of held-out rows.
        seed: 0 to 2**30.
        answer_form: how completions state the answer: ``tag``, ``box``, ``number`` or ``text``. The prompt asks for it.

    Raises:
        ConfigError: an argument is invalid, a task is unknown or refused, or a task has fewer distinct problems.
        ImportError: reasoning_gym is not installed.
    """
    mixture = {tasks: {}} if isinstance(tasks, str) else tasks
    rows = _make_splits(mixture, size, held_out, seed, answer_form)
    _warn_about_tasks_left_out(mixture, held_out)
    return rows


def _make_splits(
    mixture: Mapping[str, Mapping[str, Any]],
    size: int = SIZE,
    held_out: int = HELD_OUT,
    seed: int = SEED,
    answer_form: str = "tag",
) -> tuple[list[Row], list[Row]]:
    _check_arguments(mixture, size, held_out, seed, answer_form)
    wanted = json.dumps([mixture, size, held_out, seed, answer_form])
    rows: dict[str, list[Row]] = json.loads(_generate_apart(wanted))
    return rows["train"], rows["held_out"]


def is_generated(data: str | None) -> bool:
    """Whether ``data`` of a run file names a task, such as ``"reasoning_gym:chain_sum"``, and not a file."""
    return data is not None and data.startswith(PREFIX)


def load_split(data: str, arguments: Mapping[str, Any], *, held_out: bool) -> list[Row]:
    """Return the training rows or the held-out rows of a run file.

    Args:
        data: ``"reasoning_gym:chain_sum"``, or several tasks with ``+`` between them.
        arguments: ``data_args`` of the run file: the keywords of :func:`make_rows`, a table for each task, and
            arguments of the task itself if there is only one.
        held_out: whether to return the held-out rows.

    Raises:
        ConfigError, ImportError: as :func:`make_rows`.
    """
    names = [name.strip() for name in data.removeprefix(PREFIX).split("+")]
    if not all(names) or len(set(names)) < len(names):
        raise ConfigError(
            f"{data!r} names no task, or one twice: write {PREFIX}chain_sum, or several with + between them"
        )
    keywords = ("size", "held_out", "seed", "answer_form")
    mixture: dict[str, Any] = {name: arguments.get(name, {}) for name in names}
    for name, value in arguments.items():
        if name in keywords or name in names:
            continue
        if len(names) > 1 or not isinstance(mixture[names[0]], Mapping):
            raise ConfigError(
                f"data_args has {name!r}{suggest_nearest(name, [*keywords, *names])}; with several tasks "
                f"or a table, the arguments of each stand in a table: [data_args.{names[0]}]"
            )
        mixture[names[0]] = {**mixture[names[0]], name: value}
    rows = _make_splits(mixture, **{name: arguments[name] for name in keywords if name in arguments})[int(held_out)]
    if held_out:
        _warn_about_tasks_left_out(mixture, len(rows))
    return rows


@functools.cache  # once for the training rows and the held-out rows
def warn_about_other_form(template: str, form: str) -> None:
    """Warn if ``template`` asks for an answer in which ``form`` finds none.

    It is no error, because other rewards than that of the task do not read the form.
    """
    asked = _TEMPLATE_FORMS.get(template, form)
    if form != asked and form in ("box", "tag"):  # the other forms read any text
        logger.warning(
            "prompt_template=%r asks for another form of answer than answer_form=%r, in which the reward reasoning_gym "
            "finds no answer: set answer_form = %r in data_args",
            *(template, form, asked),
        )


def _check_arguments(mixture: Mapping[str, Any], size: Any, held_out: Any, seed: Any, answer_form: Any) -> None:
    for name, value, least in (("size", size, 1), ("held_out", held_out, 0), ("seed", seed, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= 2**30:
            raise ConfigError(f"{name} is {value!r}, expected a whole number from {least} to {2**30}")
    if answer_form not in get_args(AnswerForm):
        raise ConfigError(f"answer_form is {answer_form!r}, expected one of {', '.join(get_args(AnswerForm))}")
    if not mixture:
        raise ConfigError("tasks is empty: name at least one task of reasoning_gym")
    weights: dict[str, float] = {}
    for task, table in mixture.items():
        weight = table.get("weight", 1) if isinstance(table, Mapping) else None
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < float("inf"):
            raise ConfigError(
                f"the arguments of the task {task} are {table!r}: expected a table, with a weight above 0"
            )
        weights[task] = weight
    for task, count in zip(weights, share_by_weight(size, weights), strict=True):
        if count == 0:
            raise ConfigError(
                f"the task {task} has no training row: its weight of {weights[task]:g} in {sum(weights.values()):g} is "
                f"less than one of size={size} rows; raise size or the weight, or leave the task out"
            )


def _warn_about_tasks_left_out(mixture: Mapping[str, Mapping[str, Any]], held_out: int) -> None:
    """Warn if there are held-out rows, and none of some task: an evaluation says nothing about this task."""
    counts = share_by_weight(held_out, {task: table.get("weight", 1) for task, table in mixture.items()})
    left_out = [task for task, count in zip(mixture, counts, strict=True) if count == 0]
    if held_out and left_out:
        logger.warning(
            "held_out=%d gives no held-out row of the task %s (%d of %d tasks): an evaluation does not measure it; "
            "raise held_out or the weight of the task",
            *(held_out, left_out[0], len(left_out), len(mixture)),
        )


@functools.lru_cache(maxsize=4)  # the training rows and the held-out rows of a run
def _generate_apart(wanted: str) -> bytes:
    """Return the JSON text of the rows, generated by :func:`main` in a process with fixed hashes of text."""
    code = f"import sys, json; sys.path[:] = json.loads(sys.argv[1]); from {__name__} import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(sys.path)],
        input=wanted.encode(),
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONHASHSEED": "0"},
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the process that generates rows of reasoning_gym ended with code {done.returncode}")
    answer = json.loads(done.stdout)
    for kind, message in answer.get("error", {}).items():
        raise {"ConfigError": ConfigError, "ImportError": ImportError}[kind](message)
    return done.stdout


def main() -> None:
    """Read the arguments of rows from standard input, and write the rows to standard output, as JSON."""
    source, answers = take_streams()  # a task may print
    mixture, size, held_out, seed, answer_form = json.loads(source.read())
    try:
        weights = {task: table.pop("weight", 1) for task, table in mixture.items()}
        drawn: dict[str, list[Row]] = {"train": [], "held_out": []}
        counts = zip(share_by_weight(size, weights), share_by_weight(held_out, weights), strict=True)
        for (task, arguments), (train, held) in zip(mixture.items(), counts, strict=True):
            asked: set[str] = set()
            for split, count, start in (("held_out", held, seed + _HELD_OUT_SEED), ("train", train, seed)):
                drawn[split] += _draw_rows(task, arguments, count, start, answer_form, asked)
        answer: Mapping[str, Any] = drawn
    except (ConfigError, ImportError) as error:
        answer = {"error": {"ConfigError" if isinstance(error, ConfigError) else "ImportError": str(error)}}
    with contextlib.closing(answers):
        answers.write(json.dumps(answer).encode())


def share_by_weight(count: int, weights: Mapping[str, float]) -> list[int]:
    """Divide ``count`` by weights. The shares add up to ``count``; each is less than 1 away from the exact share."""
    bounds, total, passed = [0], sum(weights.values()), 0.0
    for weight in weights.values():
        passed += weight
        bounds.append(round(count * passed / total))
    return [high - low for low, high in itertools.pairwise(bounds)]


def _draw_rows(
    task: str, arguments: Mapping[str, Any], count: int, seed: int, answer_form: str, asked: set[str]
) -> list[Row]:
    """Return ``count`` rows with questions that are not in ``asked``, and add these questions to ``asked``."""
    rows: list[Row] = []
    idle = 0  # draws since the last new problem
    for problem in _list_problems(task, arguments, seed):
        if len(rows) == count:
            break
        if problem["question"] in asked:
            idle += 1
            if idle == _PATIENCE:
                raise ConfigError(
                    f"the task {task} with {dict(arguments)} has only about {len(asked)} distinct problems, too few "
                    "for size and held_out together: lower them, or widen its arguments"
                )
            continue
        asked.add(problem["question"])
        idle = 0
        rows.append(_make_row(task, arguments, problem, answer_form))
    return rows


def _list_problems(task: str, arguments: Mapping[str, Any], seed: int) -> Iterator[Mapping[str, Any]]:
    """Yield the problems of a task without end."""
    while True:
        _seed_global_generators(seed)
        dataset = make_dataset(task, arguments, seed=seed, size=_CHUNK)
        for index in range(_CHUNK):
            _seed_global_generators(seed + index)
            try:
                yield dataset[index]
            except Exception as error:  # the generator's, for arguments that it cannot fulfil
                raise ConfigError(
                    f"the task {task} with {dict(arguments)} cannot make problem {index} of seed {seed}: "
                    f"{type(error).__name__}: {error}"
                ) from error
        seed += _CHUNK


def _seed_global_generators(seed: int) -> None:
    """Seed the global generators from which list_functions also draws. The worker process does nothing else."""
    random.seed(seed)
    np.random.seed(seed)


def _make_row(task: str, arguments: Mapping[str, Any], problem: Mapping[str, Any], answer_form: str) -> Row:
    question, answer = problem["question"], problem["answer"]
    try:
        entry = json.dumps({"arguments": dict(arguments), "metadata": pack(problem["metadata"])})
    except ConfigError as error:
        raise ConfigError(f"the metadata of the task {task} cannot be stored in a row: {error}") from None
    return {
        "prompt": [{"role": "user", "content": f"{question}\n\n{INSTRUCTIONS[answer_form]}"}],
        "question": question,
        "answer": None if answer is None else str(answer),
        "task": task,
        "answer_form": answer_form,
        "entry": entry,
    }
