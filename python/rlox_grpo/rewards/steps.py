"""Scores of the steps of a completion (process rewards): read what a function returns, and find the tokens."""

from __future__ import annotations

import inspect
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlox_grpo.rewards.calls import RewardError
from rlox_grpo.types import Completion, RolloutGroup, ScoredGroup, StepScores


def split_steps(name: str, values: Any) -> tuple[Any, tuple[StepScores | None, ...] | None]:
    """Split what a function returned into the rewards of the completions and, if there are steps, their scores.

    Raises:
        RewardError: some values are StepScores and others are numbers.
    """
    if not isinstance(values, (list, tuple)) or not any(isinstance(value, StepScores) for value in values):
        return values, None
    for index, value in enumerate(values):
        if value is not None and not isinstance(value, StepScores):
            raise RewardError(
                f"reward function {name} returned {value!r} for sample {index} and StepScores for others: "
                "expected StepScores or None for each"
            )
    return [None if value is None else value.mean for value in values], tuple(values)


def declares_steps(function: Any) -> bool:
    """Return whether the signature of a reward function says that it returns StepScores."""
    while hasattr(function, "func") or hasattr(function, "function"):  # partial, InWorkers
        function = function.func if hasattr(function, "func") else function.function
    target = function if inspect.isroutine(function) else type(function).__call__
    return StepScores.__name__ in str(getattr(target, "__annotations__", {}).get("return", ""))


def find_wrong_ends(name: str, steps: Sequence[StepScores | None], groups: Sequence[RolloutGroup]) -> dict[int, str]:
    """Return the samples with a step that ends outside the completion: row → what is wrong.

    Args:
        name: the name of the function.
        steps: the steps of each completion.
        groups: the groups of the completions, in order.
    """
    wrong = {}
    samples = [(group.prompt.name, completion) for group in groups for completion in group.completions]
    for row, (row_steps, (prompt, completion)) in enumerate(zip(steps, samples, strict=True)):
        length = count_units(completion)
        if row_steps is not None and (row_steps.ends[0] < 1 or row_steps.ends[-1] > length):
            what = "tokens" if completion.text is None else "characters"
            wrong[row] = (
                f"reward function {name}: StepScores.ends is {list(row_steps.ends)} for a completion of {length} "
                f"{what} of {prompt}: expected offsets from 1 to {length}"
            )
    return wrong


def count_units(completion: Completion) -> int:
    """Return the length of a completion in the unit of ``StepScores.ends``: characters, or tokens without text."""
    return len(completion.token_ids) if completion.text is None else len(completion.text)


def locate_steps(scored: ScoredGroup, decode: Callable[[list[int]], str] | None) -> ScoredGroup:
    """Return the group with the ends of its steps as offsets after a token, instead of after a character.

    Args:
        scored: a group as :func:`rlox_grpo.rewards.score` returns it.
        decode: decodes token ids, in the same way as the texts of the completions were made; None: completions are
            token ids, and ends are offsets of tokens already.
    """
    if not scored.step_scores:
        return scored
    located: Mapping[str, tuple[StepScores | None, ...]] = {
        name: tuple(
            None if steps is None else _locate(steps, completion, decode)
            for steps, completion in zip(group_steps, scored.group.completions, strict=True)
        )
        for name, group_steps in scored.step_scores.items()
    }
    return replace(scored, step_scores=located)


def _locate(steps: StepScores, completion: Completion, decode: Callable[[list[int]], str] | None) -> StepScores:
    ids, text = completion.token_ids.tolist(), completion.text
    if text is None or decode is None:
        return steps

    # The first token at which the decoded text reaches the end of the step.
    counts = range(1, len(ids) + 1)
    ends = [1 + bisect_left(counts, end, key=lambda count: len(decode(ids[:count]))) for end in steps.ends]
    return StepScores([min(end, len(ids)) for end in ends], steps.scores)
