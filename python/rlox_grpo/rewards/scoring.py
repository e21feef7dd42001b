"""Score rollouts with rules and reward functions."""

from __future__ import annotations

import inspect
import logging
import math
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from rlox_grpo.errors import ConfigError
from rlox_grpo.rewards.arguments import collect_arguments, collect_columns
from rlox_grpo.rewards.calls import (
    HINT,
    RewardError,
    RewardFn,
    add_hint,
    attempt,
    find_nan_rows,
    function_name,
    gather,
    hint_at_kind,
    select_arguments,
    split_measures,
    to_list,
    to_scores,
    took_lengths_alone,
    warn_about_defaults,
    warn_about_nones,
)
from rlox_grpo.rewards.copies import copy_arguments
from rlox_grpo.rewards.environment import EnvironmentReward, add_turn_rewards, find_failed
from rlox_grpo.rewards.steps import count_units, find_wrong_ends, split_steps
from rlox_grpo.rewards.unscored import refuse_unscored, warn_if_unscored
from rlox_grpo.rewards.verdicts import (
    ERROR,
    OK,
    OUTCOMES,
    RARE,
    STATUSES,
    TIMEOUT,
    AsyncRule,
    BoolArray,
    Float64Array,
    Rule,
    UInt8Array,
    Verdicts,
    leave_out_failed,
    sum_weighted,
)
from rlox_grpo.rewards.worker_pool import Outcomes
from rlox_grpo.rewards.workers import InWorkers
from rlox_grpo.types import Prompt, RolloutGroup, ScoredGroup, StepScores

logger = logging.getLogger(__name__)


def score(
    groups: Sequence[RolloutGroup],
    reward_fns: RewardFn | Sequence[RewardFn],
    weights: Sequence[float] | None = None,
    *,
    names: Sequence[str] | None = None,
    on_error: Literal["stop", "none"] = "stop",
) -> list[ScoredGroup]:
    """Score every completion with every function. Each function is called once with the whole batch, prompt-major.

    A function receives ``prompts``, ``completions`` (texts, or lists of messages for chat prompts), ``completion_ids``
    (lists of ints) and each column, repeated for each completion. If completions contain observations, it also receives
    ``sampled_mask`` (lists of bools, True on sampled tokens). Without a tokenizer, ``completions`` are 1-D int64
    tensors and ``prompts`` is a tensor ``[N, prompt_len]``, or a list if the lengths differ, as in rlox. Each function
    gets its own copies, even of a value that several completions share. A function in
    :class:`~rlox_grpo.rewards.InWorkers` is called in worker processes.

    A function may return ``(scores, measures)``. Measures map a name to one number or to one for each completion.
    Measures are logged and do not change the reward.

    Args:
        groups: Rollouts, all with text or all without.
        reward_fns: One function or several. The score None or NaN means that the function does not apply to a sample,
            which the other functions then score alone. A sample that failed has no score from any function, so that it
            is left out of its group: its episode failed, a function failed or ran out of time, or a rule could not
            judge it.
        weights: One for each function; by default its ``weight`` attribute, or else 1.
        names: The name of each function in the results; by default those of :func:`make_unique_names`.
        on_error: If a function raises an error or returns something that is not a score: ``stop`` raises, ``none``
            lets every sample of the call fail. Functions in workers have their own ``on_error``; an error of a rule is
            always raised.

    Returns:
        Each group with its total (weighted sum of the functions that apply; NaN without a score), the scores of each
        function, the statuses of rules, the outcomes of other functions, and the time of each. If two functions have
        the same name, the second is reported as ``name_2``.

    Raises:
        RewardError: A function raises an error, or returns a wrong number of scores, something other than numbers, an
            infinity, or no score at all; or every sample failed. With ``on_error="none"`` these errors are warnings,
            unless all episodes failed. The message names the function and, if known, the sample.
        ValueError: Wrong weights, only some groups have text, or only some prompts have a column.
    """
    functions = [reward_fns] if callable(reward_fns) else list(reward_fns)
    scored = score_batches([RewardBatch(groups, functions, weights, names)], on_error)[0]
    refuse_unscored(scored, functions, on_error)
    return scored


@dataclass(frozen=True, eq=False)
class RewardBatch:
    """Groups and the functions that score them; see :func:`score`."""

    groups: Sequence[RolloutGroup]
    functions: Sequence[RewardFn]
    weights: Sequence[float] | None = None
    names: Sequence[str] | None = None


def score_batches(
    batches: Sequence[RewardBatch], on_error: Literal["stop", "none"] = "stop"
) -> list[list[ScoredGroup]]:
    """Score several batches, each with its own functions, as :func:`score` does. The async functions wait together.

    A batch in which no completion has a reward is no error here, as it may be a part of a step: call
    :func:`rlox_grpo.rewards.unscored.refuse_unscored` with the whole.
    """
    calls: list[_Calls] = []
    try:
        for batch in batches:
            calls.append(_Calls(batch))
            calls[-1].begin(on_error)
        waiting = [(call, name, awaitable) for call in calls for name, awaitable in call.waiting.items()]
        results = gather([(name, awaitable) for _, name, awaitable in waiting])
        for (call, name, _), (result, seconds) in zip(waiting, results, strict=True):
            completions = call.arguments["completions"]
            result = add_hint(result, call.functions[name], call.copies.get(name, call.arguments))
            call.by_function[name] = _score_by_function(name, result, completions, call.batch.groups, on_error)
            call.by_function[name].seconds = seconds
            if name in call.copies:
                _warn_about_lengths(name, call.by_function[name].scores, call.copies[name]["completions"])
    except BaseException:
        for call in calls:
            for left in call.waiting.values():
                if hasattr(left, "close"):
                    left.close()  # Python warns of coroutines that are never awaited
        raise
    return [call.finish() for call in calls]


class _Calls:
    """The calls of the functions of a batch.

    Attributes:
        arguments: of the functions, with one value for each completion; empty without completions.
        functions: the functions by name.
        by_function: the scores of each function that has returned, by name.
        waiting: what async functions have returned, by name.
        copies: the arguments of async functions of the user, by name; ChatCompletion records what they have read.
    """

    def __init__(self, batch: RewardBatch) -> None:
        self.batch = batch
        self._names = make_unique_names(batch.functions) if batch.names is None else batch.names
        self.functions = dict(zip(self._names, batch.functions, strict=True))
        self._factors = reward_weights(batch.functions, batch.weights)
        rows = sum(len(group.completions) for group in batch.groups)
        self.arguments = collect_arguments(batch.groups) if rows else {}
        self.by_function: dict[str, _FunctionScores] = {}
        self.waiting: dict[str, Awaitable[Any]] = {}
        self.copies: dict[str, dict[str, Any]] = {}

    def begin(self, on_error: Literal["stop", "none"]) -> None:
        """Call every function."""
        groups, functions = self.batch.groups, self.functions
        arguments, by_function = self.arguments, self.by_function
        if not arguments:
            return
        for name, function in functions.items():
            start = time.perf_counter()
            if isinstance(function, Rule):
                by_function[name] = _score_by_rule(name, function, arguments)
            elif isinstance(function, AsyncRule):
                columns = {column: values for column, values in arguments.items() if column != "completions"}
                self.waiting[name] = function.gather_verdicts(arguments["completions"], columns)
                continue
            elif isinstance(function, EnvironmentReward):
                by_function[name] = _FunctionScores(function.read(groups))
            elif isinstance(function, InWorkers):
                by_function[name] = _score_by_workers(name, function, arguments, groups)
            else:
                copied = copy_arguments(arguments)
                positional, keywords = select_arguments(function, copied)
                result = attempt(name, partial(function, *positional, **keywords))
                if inspect.isawaitable(result):
                    self.waiting[name], self.copies[name] = result, copied
                    continue
                # After the call, because ChatCompletion records what the function has read.
                result = add_hint(result, function, copied)
                by_function[name] = _score_by_function(name, result, arguments["completions"], groups, on_error)
                _warn_about_lengths(name, by_function[name].scores, copied["completions"])
            by_function[name].seconds = time.perf_counter() - start

    def finish(self) -> list[ScoredGroup]:
        """Return the scored groups, after every function has returned."""
        groups, functions = self.batch.groups, self.batch.functions
        if not self.arguments:
            return [ScoredGroup(group, np.empty(0, np.float32), {}) for group in groups]
        ordered = {name: self.by_function[name] for name in self._names}
        failed = [find_failed(groups), *(function_scores.failed for function_scores in ordered.values())]
        for name, function_scores in ordered.items():
            warn_if_unscored(name, function_scores.scores[~np.any(failed, axis=0)])
        components = leave_out_failed([function_scores.scores for function_scores in ordered.values()], failed)
        ordered = {
            name: replace(function_scores, scores=component)
            for (name, function_scores), component in zip(ordered.items(), components, strict=True)
        }
        scored = _split(groups, sum_weighted(components, self._factors), ordered)
        for function, factor in zip(functions, self._factors, strict=True):
            if isinstance(function, EnvironmentReward):
                scored = [add_turn_rewards(group, factor) for group in scored]
        return scored


def status_counts(groups: Sequence[ScoredGroup]) -> dict[str, dict[str, int]]:
    """Count the statuses of each rule and the outcomes of each other function."""
    counts: dict[str, dict[str, int]] = {}
    for group in groups:
        for by_name, labels in ((group.statuses, STATUSES), (group.outcomes, OUTCOMES)):
            for name, codes in by_name.items():
                sums = counts.setdefault(name, {status: 0 for status in labels if status not in RARE})
                for status, count in zip(labels, np.bincount(codes, minlength=len(labels)).tolist(), strict=True):
                    if count or status not in RARE:
                        sums[status] = sums.get(status, 0) + count
    return counts


@dataclass(eq=False)
class _FunctionScores:
    """Scores ``float64 [N]`` of one function, with statuses or outcomes, its measures and its feedback."""

    scores: Float64Array
    statuses: UInt8Array | None = None
    outcomes: UInt8Array | None = None
    seconds: float = 0.0
    measures: Mapping[str, Float64Array] = field(default_factory=dict)
    steps: tuple[StepScores | None, ...] | None = None
    feedback: tuple[str | None, ...] = ()

    @property
    def failed(self) -> BoolArray:
        """``bool [N]``: the samples that the function could not score, not those to which it does not apply."""
        if self.statuses is not None:
            return Verdicts(self.scores, self.statuses).failed
        if self.outcomes is not None:
            return Outcomes(self.scores, self.outcomes, {}).failed
        return np.zeros(len(self.scores), np.bool_)


def _score_by_rule(name: str, rule: Rule, arguments: Mapping[str, Any]) -> _FunctionScores:
    columns = {column: values for column, values in arguments.items() if column != "completions"}
    verdicts = attempt(name, partial(rule.verdicts, arguments["completions"], columns))
    if isinstance(verdicts, RewardError):
        raise verdicts
    scores = to_scores(name, verdicts.scores, len(verdicts.scores))
    return _FunctionScores(scores, statuses=verdicts.statuses, measures=verdicts.measures, feedback=verdicts.feedback)


def _score_by_workers(
    name: str, function: InWorkers, arguments: Mapping[str, Any], groups: Sequence[RolloutGroup]
) -> _FunctionScores:
    try:
        outcomes = function.outcomes(arguments)
    except RewardError as error:
        if error.row is None:
            raise
        hint = hint_at_kind(arguments["completions"][0], error)
        raise RewardError(f"{error}; {_describe_row(groups, error.row)}{hint}", error.row) from None
    failed = np.flatnonzero(outcomes.codes)
    if len(failed):
        late = int((outcomes.codes == TIMEOUT).sum())
        first = int(failed[0])
        what = outcomes.messages.get(first, f"it took more than {function.timeout:g} s")
        logger.warning(
            "reward function %s: of %d samples %d ran out of time and %d failed; the first: %s; %s",
            *(name, len(outcomes.codes), late, len(failed) - late, what, _describe_row(groups, first)),
        )
    scores = _FunctionScores(outcomes.scores, outcomes=outcomes.codes, steps=_list_steps(outcomes, groups))
    return _drop_wrong_steps(name, scores, groups, function.on_error)


def _list_steps(outcomes: Outcomes, groups: Sequence[RolloutGroup]) -> tuple[StepScores | None, ...] | None:
    """Return the steps of all completions; None if the function returned numbers.

    A completion that ran out of time and has a ``timeout_score`` is one step with this score.
    """
    if not outcomes.steps:
        return None
    lengths = [count_units(completion) for group in groups for completion in group.completions]
    late = {
        row: StepScores([lengths[row]], [outcomes.scores[row]])
        for row in np.flatnonzero((outcomes.codes == TIMEOUT) & ~np.isnan(outcomes.scores)).tolist()
        if lengths[row]
    }
    return tuple((outcomes.steps | late).get(row) for row in range(len(lengths)))


def _score_by_function(
    name: str, result: Any, completions: Sequence[Any], groups: Sequence[RolloutGroup], on_error: str
) -> _FunctionScores:
    rows = len(completions)
    try:
        if isinstance(result, RewardError):
            raise result
        if isinstance(result, Verdicts):
            return _FunctionScores(
                to_scores(name, result.scores, rows),
                statuses=result.statuses,
                measures=result.measures,
                feedback=result.feedback,
            )
        result, measures = split_measures(name, result, rows)
        result, steps = split_steps(name, result)
        scores = to_scores(name, result, rows)
        _warn_about_nan(name, result)
    except RewardError as error:
        if on_error == "stop":
            raise
        logger.warning("%s; none of its %d samples has a score from it", error, rows)
        return _FunctionScores(np.full(rows, np.nan), outcomes=np.full(rows, ERROR, np.uint8))
    outcomes = None if on_error == "stop" else np.full(rows, OK, np.uint8)
    function_scores = _FunctionScores(scores, outcomes=outcomes, measures=measures, steps=steps)
    return _drop_wrong_steps(name, function_scores, groups, on_error)


def _drop_wrong_steps(
    name: str, scored: _FunctionScores, groups: Sequence[RolloutGroup], on_error: str
) -> _FunctionScores:
    """Return the scores in which samples with wrong steps have failed: a step ends outside the completion.

    From workers, also a sample with a number where others have steps.

    Raises:
        RewardError: there is such a sample, and ``on_error`` is ``"stop"``.
    """
    if scored.steps is None:
        return scored
    wrong = find_wrong_ends(name, scored.steps, groups)
    for row, steps in enumerate(scored.steps):
        is_late = scored.outcomes is not None and scored.outcomes[row] == TIMEOUT
        if steps is None and not np.isnan(scored.scores[row]) and not is_late:
            wrong[row] = (
                f"reward function {name} returned {scored.scores[row]:g} for sample {row} and StepScores for others: "
                "expected StepScores or None for each"
            )
    if not wrong:
        return scored
    first, rows = min(wrong), list(wrong)
    if on_error == "stop" or scored.outcomes is None:
        raise RewardError(f"{wrong[first]}; {_describe_row(groups, first)}", first)
    logger.warning("%s; %d of its %d samples fail for their steps", wrong[first], len(wrong), len(scored.steps))
    scored.scores[rows], scored.outcomes[rows] = np.nan, ERROR
    return replace(scored, steps=tuple(None if row in wrong else steps for row, steps in enumerate(scored.steps)))


_nan_warned: set[str] = set()


def _warn_about_nan(name: str, result: Any) -> None:
    """Warn, once for each function, of scores that are NaN and not None."""
    values = to_list(name, result)
    rows = find_nan_rows(values)
    if rows and name not in _nan_warned:
        _nan_warned.add(name)
        logger.warning(
            "reward function %s returned NaN for %d of %d samples, the first is sample %d: NaN counts as None, the "
            "function does not apply to them. Return None to say so, or a number",
            *(name, len(rows), len(values), rows[0]),
        )


_lengths_warned: set[str] = set()


def _warn_about_lengths(name: str, scores: Float64Array, completions: Sequence[Any]) -> None:
    """Warn, once for each function, if all scores are equal because it scored the number of messages."""
    is_constant = len(scores) > 1 and bool((scores == scores[0]).all())
    if is_constant and name not in _lengths_warned and took_lengths_alone(completions):
        _lengths_warned.add(name)
        logger.warning(
            "reward function %s gave all %d samples the score %g: it took len() of each completion, which is the "
            "number of its messages, and read none of them; %s",
            *(name, len(scores), scores[0], HINT),
        )


def check_rewards(prompts: Sequence[Prompt], reward_fns: Sequence[RewardFn]) -> None:
    """Check prompts and reward functions before a run.

    Every rule reads its columns of all prompts, so that a missing or unreadable gold answer is an error and not a score
    of 0 in every step. For functions in workers, a worker process is started.

    Raises:
        ValueError: A prompt lacks a column that other prompts have, or a rule cannot read a column; the message names
            the prompt.
        RewardError: A function requires an argument that is not a column, or cannot run in a worker.
    """
    empty = [""] * len(prompts)
    arguments = {"prompts": empty, "completion_ids": [[]] * len(prompts)}
    arguments |= collect_columns([(prompt, 1) for prompt in prompts])
    for name, function in zip(make_unique_names(reward_fns), reward_fns, strict=True):
        if isinstance(function, Rule):
            try:
                function.verdicts(empty, arguments)
            except ValueError as error:
                raise ValueError(f"the prompts do not fit the reward {name}: {error}") from error
        elif isinstance(function, AsyncRule):
            try:
                function.check(arguments, len(prompts))
            except ValueError as error:
                raise ValueError(f"the prompts do not fit the reward {name}: {error}") from error
        elif not isinstance(function, EnvironmentReward):
            called = function.function if isinstance(function, InWorkers) else function
            available = {**arguments, "completions": empty}
            select_arguments(called, available)
            warn_about_defaults(called, available)
            warn_about_nones(called, prompts)
            if isinstance(function, InWorkers):
                function.start()


def _describe_row(groups: Sequence[RolloutGroup], row: int) -> str:
    """Describe which sample a row is."""
    samples = [(group.prompt.name, *each) for group in groups for each in enumerate(group.completions)]
    prompt, index, completion = samples[row]
    shown = "" if completion.text is None else f": {completion.text[:80]!r}"
    return f"the sample is completion {index} of {prompt}{shown}"


def make_unique_names(functions: Sequence[RewardFn]) -> list[str]:
    """Return the names of the functions in metrics. The second function of a name is ``name_2``."""
    taken: list[str] = []
    for name in map(function_name, functions):
        number, unique = 2, name
        while unique in taken:
            unique, number = f"{name}_{number}", number + 1
        taken.append(unique)
    return taken


def reward_weights(functions: Sequence[RewardFn], weights: Sequence[float] | None) -> list[float]:
    """Return the weight of each function: the given one, else its ``weight`` attribute, else 1.

    Raises:
        ValueError: There is no function, or a weight is not finite.
        ConfigError: The numbers of weights and functions differ.
    """
    if not functions and not weights:
        raise ValueError(
            "reward_fn is empty: expected at least one reward function, an environment that scores its episodes, a "
            "teacher, or rewards of each source and each held-out set"
        )
    if weights is None:
        weights = [getattr(function, "weight", 1.0) for function in functions]
    if len(weights) != len(functions):
        raise ConfigError(f"reward_weights has {len(weights)} values for {len(functions)} reward functions")
    for name, weight in zip(make_unique_names(functions), weights, strict=True):
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
            raise ValueError(f"the weight of {name} is {weight!r}, expected a finite number")
    return [float(weight) for weight in weights]


def _split(
    groups: Sequence[RolloutGroup], total: Float64Array, by_function: Mapping[str, _FunctionScores]
) -> list[ScoredGroup]:
    scored = []
    start = 0
    # The arrays of the batch are prompt-major: the rows of a group are a slice.
    for group in groups:
        rows = slice(start, start + len(group.completions))
        start = rows.stop
        scored.append(
            ScoredGroup(
                group,
                total[rows].astype(np.float32),
                {
                    name: function_scores.scores[rows].astype(np.float32)
                    for name, function_scores in by_function.items()
                },
                {
                    name: function_scores.statuses[rows]
                    for name, function_scores in by_function.items()
                    if function_scores.statuses is not None
                },
                {
                    name: function_scores.outcomes[rows]
                    for name, function_scores in by_function.items()
                    if function_scores.outcomes is not None
                },
                {
                    name: function_scores.seconds * len(group.completions) / len(total)
                    for name, function_scores in by_function.items()
                },
                measures={
                    f"{name}/{measure}": values[rows].astype(np.float32)
                    for name, function_scores in by_function.items()
                    for measure, values in function_scores.measures.items()
                },
                step_scores={
                    name: function_scores.steps[rows]
                    for name, function_scores in by_function.items()
                    if function_scores.steps is not None
                },
                feedback={
                    name: function_scores.feedback[rows]
                    for name, function_scores in by_function.items()
                    if function_scores.feedback
                },
            )
        )
    return scored
