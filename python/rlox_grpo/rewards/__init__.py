"""Rewards: rules that run in Rust, and :func:`score`, which applies them and the user's own functions to rollouts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlox_grpo.rewards.answers import Countdown, ExactAnswer, GSM8KAnswer, MultipleChoice, extract_answer
from rlox_grpo.rewards.calls import RewardError, RewardFn, call, checked, function_name, gather
from rlox_grpo.rewards.composite import Composite
from rlox_grpo.rewards.formats import TagCount, TagFormat
from rlox_grpo.rewards.lengths import CosineLength, Overlong, ReasoningLength, Repetition
from rlox_grpo.rewards.math_answers import MajorityVote, MathAnswer, math_equal
from rlox_grpo.rewards.published import PUBLISHED, PublishedAnswer, PublishedCountdown, published
from rlox_grpo.rewards.verdicts import STATUSES, Rule, Verdicts, weighted_sum
from rlox_grpo.types import RolloutGroup, ScoredGroup

__all__ = [
    "PUBLISHED",
    "STATUSES",
    "Composite",
    "CosineLength",
    "Countdown",
    "ExactAnswer",
    "GSM8KAnswer",
    "MajorityVote",
    "MathAnswer",
    "MultipleChoice",
    "Overlong",
    "PublishedAnswer",
    "PublishedCountdown",
    "ReasoningLength",
    "Repetition",
    "RewardError",
    "RewardFn",
    "Rule",
    "TagCount",
    "TagFormat",
    "Verdicts",
    "extract_answer",
    "math_equal",
    "published",
    "score",
    "status_counts",
]

_OWN = ("prompts", "completions", "completion_ids")


def score(
    groups: Sequence[RolloutGroup],
    reward_fns: RewardFn | Sequence[RewardFn],
    weights: Sequence[float] | None = None,
) -> list[ScoredGroup]:
    """Score every completion with every function, each called once on the whole batch, prompt-major.

    A function receives ``prompts`` ``completions`` (texts, or lists of one assistant message where
    the prompt is chat messages), ``completion_ids`` (lists of ints) and each column, repeated per completion. Where the
    completions have no text, ``completions`` are 1-D int64 tensors and ``prompts`` their stacked ``[N, prompt_len]``
    tokens (a list, if lengths differ), as rlox passes them.

    Args:
        groups: Rollouts, all with text or all without.
        reward_fns: One function or several. None or NaN from one means that it does not apply to that sample.
        weights: One for each function; by default its ``weight`` attribute, else 1.

    Returns:
        Each group with its total (weighted sum over the functions that apply, NaN where none does), each function's own
        scores, and the statuses of rules. A second function of one name is reported as ``name_2``.

    Raises:
        RewardError: When a function raises, or returns a wrong number of scores, something else than numbers, an
            infinity, or no score at all; it names the function and, where known, the sample.
        ValueError: For wrong weights, groups of which only some have text, or columns that not every prompt has.
    """
    functions = [reward_fns] if callable(reward_fns) else list(reward_fns)
    names = _unique([function_name(function) for function in functions])
    factors = _weights(functions, names, weights)
    rows = sum(len(group.completions) for group in groups)
    if not rows:
        return [ScoredGroup(group, np.empty(0, np.float32), {}) for group in groups]
    given = _given(groups)
    columns = {name: values for name, values in given.items() if name != "completions"}
    statuses: dict[str, NDArray[np.uint8]] = {}

    def apply(name: str, function: RewardFn) -> Any:
        if not isinstance(function, Rule):
            return call(function, given)
        verdicts = function.verdicts(given["completions"], columns)
        statuses[name] = verdicts.statuses
        return verdicts.scores

    results: list[Any] = []
    try:
        for name, function in zip(names, functions, strict=True):
            results.append(_guarded(name, partial(apply, name, function)))
    except RewardError:
        for result in results:
            if hasattr(result, "close"):
                result.close()  # A coroutine that nobody will await.
        raise
    components = {name: checked(name, result, rows) for name, result in zip(names, gather(results, names), strict=True)}
    total = weighted_sum(list(components.values()), factors)
    return _split(groups, total, components, statuses)


def status_counts(groups: Sequence[ScoredGroup]) -> dict[str, dict[str, int]]:
    """How often each rule gave each status over the groups, by name; counts, so that ranks can add them up."""
    counts: dict[str, dict[str, int]] = {}
    for group in groups:
        for name, statuses in group.statuses.items():
            found = np.bincount(statuses, minlength=len(STATUSES)).tolist()
            sums = counts.setdefault(name, dict.fromkeys(STATUSES, 0))
            for status, count in zip(STATUSES, found, strict=True):
                sums[status] += count
    return counts


def _guarded(name: str, run: Callable[[], Any]) -> Any:
    try:
        return run()
    except RewardError:
        raise
    except Exception as error:
        raise RewardError(f"reward function {name} raised {type(error).__name__}: {error}") from error


def _unique(names: Sequence[str]) -> list[str]:
    taken: list[str] = []
    for name in names:
        number, unique = 2, name
        while unique in taken:
            unique, number = f"{name}_{number}", number + 1
        taken.append(unique)
    return taken


def _weights(functions: Sequence[RewardFn], names: Sequence[str], weights: Sequence[float] | None) -> list[float]:
    if not functions:
        raise ValueError("reward_fns is empty, expected at least one function")
    if weights is None:
        weights = [getattr(function, "weight", 1.0) for function in functions]
    if len(weights) != len(functions):
        raise ValueError(f"weights has {len(weights)} values, expected {len(functions)}, one for each reward function")
    for name, weight in zip(names, weights, strict=True):
        if not isinstance(weight, (int, float)) or not math.isfinite(weight):
            raise ValueError(f"the weight of {name} is {weight!r}, expected a finite number")
    return [float(weight) for weight in weights]


def _given(groups: Sequence[RolloutGroup]) -> dict[str, Any]:
    """Every argument that a reward function can ask for, one value per completion."""
    completions = [completion for group in groups for completion in group.completions]
    has_text = [completion.text is not None for completion in completions]
    if any(has_text) and not all(has_text):
        raise ValueError(f"completion {has_text.index(False)} has no text while others have; expected all or none")
    given: dict[str, Any] = _texts(groups) if all(has_text) else _tensors(groups)
    given["completion_ids"] = [completion.token_ids.tolist() for completion in completions]
    for name in {name: None for group in groups for name in group.prompt.columns}:
        if name in _OWN:
            raise ValueError(f"a column is named {name!r}, which reward functions receive as something else")
        for group in groups:
            if name not in group.prompt.columns:
                raise ValueError(f"prompt {group.prompt.index} has no column {name!r} while others have")
        given[name] = [group.prompt.columns[name] for group in groups for _ in group.completions]
    return given


def _texts(groups: Sequence[RolloutGroup]) -> dict[str, Any]:
    prompts: list[Any] = []
    completions: list[Any] = []
    for group in groups:
        source = group.prompt.text if group.prompt.source is None else group.prompt.source
        for completion in group.completions:
            chat = isinstance(source, list)
            prompts.append(source)
            completions.append([{"role": "assistant", "content": completion.text}] if chat else completion.text)
    return {"prompts": prompts, "completions": completions}


def _tensors(groups: Sequence[RolloutGroup]) -> dict[str, Any]:
    import torch

    def tensor(ids: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(np.array(ids, dtype=np.int64))

    prompts = [tensor(group.prompt.token_ids) for group in groups for _ in group.completions]
    completions = [tensor(completion.token_ids) for group in groups for completion in group.completions]
    same = len({len(prompt) for prompt in prompts}) == 1
    return {"prompts": torch.stack(prompts) if same else prompts, "completions": completions}


def _split(
    groups: Sequence[RolloutGroup],
    total: NDArray[np.float64],
    components: dict[str, NDArray[np.float64]],
    statuses: dict[str, NDArray[np.uint8]],
) -> list[ScoredGroup]:
    scored = []
    start = 0
    for group in groups:
        rows = slice(start, start + len(group.completions))
        start = rows.stop
        scored.append(
            ScoredGroup(
                group,
                total[rows].astype(np.float32),
                {name: values[rows].astype(np.float32) for name, values in components.items()},
                {name: values[rows] for name, values in statuses.items()},
            )
        )
    return scored
