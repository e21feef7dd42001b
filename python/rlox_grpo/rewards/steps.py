"""Scores of the steps of a completion (process rewards): read what a function returns, and find the tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from rlox_grpo.rewards.calls import RewardError
from rlox_grpo.types import Completion, ScoredGroup, StepScores


def split_steps(name: str, values: Any) -> tuple[Any, tuple[StepScores | None, ...] | None]:
    """Split what a function returned into the rewards of the completions and their steps, if it returned any.

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


def locate_steps(scored: ScoredGroup, decode: Callable[[list[int]], str] | None) -> ScoredGroup:
    """Return the group with the ends of its steps as offsets after a token, instead of after a character.

    Args:
        scored: a group as :func:`rlox_grpo.rewards.score` returns it.
        decode: decodes token ids as the texts of completions were; None: completions are token ids, and ends are
            offsets of tokens already.

    Raises:
        RewardError: a step ends after the completion.
    """
    if not scored.step_scores:
        return scored
    located: Mapping[str, tuple[StepScores | None, ...]] = {
        name: tuple(
            None if steps is None else _locate(name, steps, completion, scored.group.prompt.index, decode)
            for steps, completion in zip(group_steps, scored.group.completions, strict=True)
        )
        for name, group_steps in scored.step_scores.items()
    }
    return replace(scored, step_scores=located)


def _locate(
    name: str, steps: StepScores, completion: Completion, index: int, decode: Callable[[list[int]], str] | None
) -> StepScores:
    ids, text = completion.token_ids.tolist(), completion.text
    length = len(ids) if text is None else len(text)
    if steps.ends[0] < 1 or steps.ends[-1] > length:
        what = "tokens" if text is None else "characters"
        raise RewardError(
            f"reward function {name}: StepScores.ends is {list(steps.ends)} for a completion of {length} {what} of "
            f"prompts[{index}]: expected offsets from 1 to {length}"
        )
    if text is None or decode is None:
        return steps

    # The first token at which the decoded text reaches the end of the step.
    counts = range(1, len(ids) + 1)
    ends = [1 + bisect_left(counts, end, key=lambda count: len(decode(ids[:count]))) for end in steps.ends]
    return StepScores([min(end, len(ids)) for end in ends], steps.scores)
