"""Score samples of other trainers: a text, its ground truth, and further columns."""

from __future__ import annotations

import contextlib
import inspect
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlox_grpo.rewards import STATUSES, RewardError, RewardFn
from rlox_grpo.rewards.calls import call, gather, read_scores
from rlox_grpo.rewards.copies import copy_arguments
from rlox_grpo.rewards.scoring import make_unique_names, reward_weights
from rlox_grpo.rewards.verdicts import Float64Array, leave_out_failed, sum_weighted
from rlox_grpo.rewards.workers import InWorkers


@dataclass(frozen=True, eq=False)
class Scores:
    """Scores and statuses of N samples.

    Attributes:
        total: ``float64 [N]``, the weighted sum of the rules that apply; NaN if none applies, or if the sample failed:
            a rule could not judge it, or a function in workers failed or ran out of time.
        components: the scores of each rule in order, ``float64 [N]``, NaN where it does not apply or the sample failed.
        statuses: the worst status of each sample among the rules; "ok" for functions that are not rules.
    """

    total: Float64Array
    components: dict[str, Float64Array]
    statuses: list[str]


def as_rules(rules: RewardFn | Sequence[RewardFn]) -> tuple[RewardFn, ...]:
    """Return one or several rules as a tuple.

    Raises:
        ValueError: there is no rule, or one is not callable.
    """
    several = (rules,) if callable(rules) else tuple(rules)
    if not several or not all(callable(rule) for rule in several):
        raise ValueError(f"rules is {rules!r}, expected a reward function or several")
    return several


def read_columns(ground_truth: Any, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the columns of a sample: a ground truth that is a mapping, or otherwise the ground truth as ``answer``.

    Text that is a JSON object counts as a mapping, because labels are text in OpenRLHF and open-instruct. Columns of
    ``extra`` are added; those of the ground truth have precedence.
    """
    truth = ground_truth
    if isinstance(truth, str) and truth.lstrip().startswith("{"):
        with contextlib.suppress(ValueError, RecursionError):  # A set such as {1, 2} is an answer.
            truth = json.loads(truth)
    return {**(extra or {}), **(truth if isinstance(truth, Mapping) else {"answer": ground_truth})}


def score_samples(
    rules: Sequence[RewardFn],
    completions: Sequence[Any],
    rows: Sequence[Mapping[str, Any]],
    *,
    prompts: Sequence[Any] | None = None,
    rename: Mapping[str, str] | None = None,
) -> Scores:
    """Score a batch with every rule. Each rule is called once.

    Args:
        rules: rules, or reward functions of TRL.
        completions: texts or lists of messages.
        rows: the columns of each sample.
        prompts: the prompts, if the trainer passes them.
        rename: column that a rule reads → its name in the rows.

    Raises:
        ValueError: the numbers of rows and completions differ, or a rule cannot read a column.
        RewardError: a function returns a wrong number of scores.
    """
    if len(rows) != len(completions):
        raise ValueError(f"rows has {len(rows)} entries, expected {len(completions)}, one for each completion")
    columns: dict[str, Any] = {}
    for name in {name: None for row in rows for name in row}:
        columns[str(name)] = [row.get(name) for row in rows]
    for name, theirs in (rename or {}).items():
        if theirs not in columns:
            available = ", ".join(sorted(columns)) or "none"
            raise ValueError(f"columns[{name!r}] is {theirs!r}, and a row has no such column; it has {available}")
        columns[name] = columns[theirs]
    components: dict[str, Float64Array] = {}
    failed = [np.zeros(len(completions), np.bool_)]
    worst = np.zeros(len(completions), dtype=np.uint8)
    weights = reward_weights(rules, None)
    for name, rule in zip(make_unique_names(rules), rules, strict=True):
        if hasattr(rule, "verdicts"):  # A Rule; isinstance of a protocol takes longer than a rule does.
            verdicts = rule.verdicts(completions, columns)
            components[name], worst = verdicts.scores, np.maximum(worst, verdicts.statuses)
            failed.append(verdicts.failed)
        elif hasattr(rule, "gather_verdicts"):
            arguments = {**columns, **({"prompts": prompts} if prompts else {})}
            ((verdicts, _),) = gather([(name, rule.gather_verdicts(completions, arguments))])
            if isinstance(verdicts, RewardError):
                raise verdicts
            components[name], worst = verdicts.scores, np.maximum(worst, verdicts.statuses)
            failed.append(verdicts.failed)
        elif isinstance(rule, InWorkers):
            outcomes = rule.outcomes(
                {**columns, "completions": completions, **({"prompts": prompts} if prompts else {})}
            )
            components[name] = outcomes.scores
            failed.append(outcomes.failed)
        else:
            components[name] = _call_function(rule, name, completions, columns, prompts)
    components = dict(zip(components, leave_out_failed(list(components.values()), failed), strict=True))
    total = sum_weighted(list(components.values()), weights)
    return Scores(total, components, [STATUSES[status] for status in worst])


def _call_function(
    function: RewardFn, name: str, completions: Sequence[Any], columns: Mapping[str, Any], prompts: Sequence[Any] | None
) -> Float64Array:
    prompts = [None] * len(completions) if prompts is None else prompts
    result = call(function, copy_arguments({**columns, "completions": completions, "prompts": prompts}))
    if inspect.isawaitable(result):
        ((result, _),) = gather([(name, result)])
        if isinstance(result, RewardError):
            raise result
    return np.array(read_scores(name, result, len(completions)), dtype=np.float64)


def fill_missing(scores: Float64Array, not_applicable: float) -> list[float]:
    """Convert scores to floats, with ``not_applicable`` for NaN: most trainers have no missing reward."""
    return [not_applicable if math.isnan(score) else score for score in scores.tolist()]
