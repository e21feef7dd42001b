"""Countdown: reach a target with each of the given numbers once. Problems and prompt text.

A row has the columns of the public Countdown sets, ``nums`` (list of int) and ``target`` (int).
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

import numpy as np

from rlox_grpo.prompts.load import read_rows
from rlox_grpo.prompts.tasks.split import split_by_key

Operator = Literal["+", "-", "*", "/"]
OPERATORS: tuple[Operator, ...] = ("+", "-", "*", "/")
DEFAULT_PREFILL = "Let me work through this.\n<think>"
"""Prefill of the assistant's turn in :func:`format_chat_prompt`."""


class CountdownRow(TypedDict):
    """One problem, in the columns of the public sets."""

    nums: list[int]
    target: int


def generate_problems(
    count: int,
    *,
    seed: int,
    how_many: Sequence[int] = (3, 4),
    numbers: tuple[int, int] = (1, 100),
    operators: Collection[Operator] = OPERATORS,
    targets: tuple[int, int] = (1, 100),
) -> list[CountdownRow]:
    """Draw ``count`` distinct solvable problems: the target is the result of a random combination of the numbers.

    Two problems are the same if they have the same target and the same numbers in any order. All intermediate results
    of the drawn combination are positive integers, and all divisions are exact.

    Args:
        count: Number of problems.
        seed: The same seed and arguments return the same list.
        how_many: Possible amounts of numbers in a problem, each at least 2.
        numbers: Lowest and highest number.
        operators: Some of ``+ - * /``.
        targets: Lowest and highest target.

    Raises:
        ValueError: An argument is invalid, or fewer than ``count`` problems were found.
    """
    chosen = _check_operators(operators)
    _check_range("numbers", numbers)
    _check_range("targets", targets)
    if count < 0:
        raise ValueError(f"count is {count}, expected at least 0")
    if not how_many or min(how_many) < 2:
        raise ValueError(f"how_many is {list(how_many)}, expected sizes of at least 2")
    rng = np.random.default_rng(seed)
    problems: dict[tuple[tuple[int, ...], int], CountdownRow] = {}
    patience = 1000 + 200 * count
    for _ in range(patience):
        if len(problems) == count:
            break
        size = int(how_many[int(rng.integers(len(how_many)))])
        nums = [int(n) for n in rng.integers(numbers[0], numbers[1] + 1, size=size)]
        target = _combine_at_random(nums, chosen, rng)
        if target is not None and targets[0] <= target <= targets[1]:
            problems.setdefault((tuple(sorted(nums)), target), {"nums": nums, "target": target})
    if len(problems) < count:
        raise ValueError(
            f"count is {count}, and {patience} draws found {len(problems)} distinct problems: allow more numbers"
        )
    return list(problems.values())


def enumerate_problems(
    how_many: int,
    *,
    numbers: tuple[int, int],
    operators: Collection[Operator] = OPERATORS,
    targets: tuple[int, int],
) -> list[CountdownRow]:
    """List all problems of a small range once, with ascending numbers and non-negative intermediate results."""
    chosen = _check_operators(operators)
    _check_range("numbers", numbers)
    _check_range("targets", targets)
    rows: list[CountdownRow] = []
    for nums in itertools.combinations_with_replacement(range(numbers[0], numbers[1] + 1), how_many):
        reached = sorted(value for value in _list_reachable(nums, chosen) if targets[0] <= value <= targets[1])
        rows += [{"nums": list(nums), "target": value} for value in reached]
    return rows


def split_rows(
    rows: Iterable[CountdownRow], *, held_out: float = 0.1, seed: int = 0
) -> tuple[list[CountdownRow], list[CountdownRow]]:
    """Split rows into training and held-out rows, which have no set of numbers in common; see :func:`split_by_key`."""
    return split_by_key(rows, lambda row: sorted(row["nums"]), held_out=held_out, seed=seed)


def check_rows(rows: Iterable[Mapping[str, Any]]) -> None:
    """Check that every row has whole-number ``nums`` and ``target``.

    Raises:
        ValueError: A column is missing or empty; the message names the row.
        TypeError: A value is not a whole number; the message names the row and the value.
    """
    for index, row in enumerate(rows):
        for column in ("nums", "target"):
            if column not in row:
                raise ValueError(f"row {index} has no column {column!r}; it has {sorted(row)}")
        nums, target = row["nums"], row["target"]
        if isinstance(nums, (str, bytes)) or not hasattr(nums, "__iter__"):
            raise TypeError(f"row {index}: nums must be a list of whole numbers, not {nums!r}")
        if len(nums) == 0:
            raise ValueError(f"row {index}: nums is empty")
        for position, number in enumerate(nums):
            if not _is_whole(number):
                raise TypeError(f"row {index}: nums[{position}] must be a whole number, not {number!r}")
        if not _is_whole(target):
            raise TypeError(f"row {index}: target must be a whole number, not {target!r}")


def load_problems(source: str | Path | Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Read rows as :func:`read_problems` does; rows without a ``prompt`` get that of :func:`format_chat_prompt`."""
    return [{"prompt": format_chat_prompt(row["nums"], row["target"]), **row} for row in read_problems(source)]


def read_problems(source: str | Path | Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Read and check the rows of a ``.jsonl`` or ``.parquet`` file, a ``datasets.Dataset`` or a list.

    Raises:
        ValueError, TypeError: the file cannot be read, or a row is not a problem; the message names the row.
    """
    rows = read_rows(source) if isinstance(source, (str, Path)) else [dict(row) for row in source]
    if not rows:
        raise ValueError("there are no problems: the source has no rows")
    check_rows(rows)
    return rows


def format_chat_prompt(
    nums: Sequence[int], target: int, *, prefill: str | None = DEFAULT_PREFILL
) -> list[dict[str, str]]:
    """Return the chat messages of a problem for an instruction-tuned model.

    ``prefill`` is the beginning of the assistant's turn, which the model continues; None: no prefill. With the default,
    completions start inside ``<think>``: use a format rule with a matching ``prefix``.
    """
    listed = ", ".join(str(n) for n in nums)
    messages = [
        {
            "role": "system",
            "content": "You are a careful assistant. Reason about a problem first, then give the answer.",
        },
        {
            "role": "user",
            "content": (
                f"Use the numbers {listed} to write an expression that equals {target}. You may use +, -, *, / and "
                "parentheses, and you must use every number exactly once. Put your reasoning between <think> and "
                "</think>, then the expression alone between <answer> and </answer>, "
                "for example <answer> (1 + 2) / 3 </answer>."
            ),
        },
    ]
    if prefill is not None:
        messages.append({"role": "assistant", "content": prefill})
    return messages


def _list_whole_results(a: int, b: int, operators: Collection[Operator]) -> list[int]:
    """Return the results of two operands: sums, larger minus smaller, products and exact quotients."""
    results = []
    high, low = max(a, b), min(a, b)
    if "+" in operators:
        results.append(a + b)
    if "-" in operators:
        results.append(high - low)
    if "*" in operators:
        results.append(a * b)
    if "/" in operators:
        results += [x // y for x, y in {(a, b), (b, a)} if y != 0 and x % y == 0]
    return results


def _list_reachable(nums: tuple[int, ...], operators: Collection[Operator]) -> set[int]:
    if len(nums) == 1:
        return {nums[0]}
    # Replace each pair by each of its results, and recurse on one number less.
    values: set[int] = set()
    for i, j in itertools.combinations(range(len(nums)), 2):
        rest = tuple(n for k, n in enumerate(nums) if k not in (i, j))
        for value in _list_whole_results(nums[i], nums[j], operators):
            values |= _list_reachable((*rest, value), operators)
    return values


def _combine_at_random(nums: Sequence[int], operators: tuple[Operator, ...], rng: np.random.Generator) -> int | None:
    """Combine the numbers in pairs, in random order; None if a result is not a positive integer."""
    left = list(nums)
    while len(left) > 1:
        i, j = (int(k) for k in rng.choice(len(left), size=2, replace=False))
        a, b = left[i], left[j]
        operator = operators[rng.integers(len(operators))]
        results = [value for value in _list_whole_results(a, b, (operator,)) if value > 0]
        if not results:
            return None
        left = [n for k, n in enumerate(left) if k not in (i, j)] + [results[0]]
    return left[0]


def _is_whole(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _check_operators(operators: Collection[Operator]) -> tuple[Operator, ...]:
    unknown = sorted(set(operators) - set(OPERATORS))
    if unknown or not operators:
        raise ValueError(f"operators is {list(operators)}, expected some of {' '.join(OPERATORS)}")
    return tuple(op for op in OPERATORS if op in operators)


def _check_range(name: str, bounds: tuple[int, int]) -> None:
    if bounds[0] > bounds[1] or bounds[0] < 0:
        raise ValueError(f"{name} is {bounds}, expected (lowest, highest) with 0 <= lowest <= highest")
