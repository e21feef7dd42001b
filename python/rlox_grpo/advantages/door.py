"""The interface of advantage functions, built-in and custom: groups with rewards → advantages.

An advantage function gets all groups of a step, as :class:`rlox_grpo.types.ScoredGroup`, and returns for each group of
G completions one of

- an array ``[G]``: one advantage for each completion;
- an array ``[G, K]``: one for each turn, NaN after the last turn of an episode;
- a list of G arrays ``[T_i]``: one for each token of a completion, and 0 on tokens that the policy did not sample.

All groups of a step have the same form. docs/guides/own_parts.md shows how to write one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlox_grpo.advantages.choose import make_built_in, make_zero_variance_test
from rlox_grpo.advantages.form import AdvantageFn
from rlox_grpo.advantages.moving import MovingBaselines
from rlox_grpo.advantages.process import has_equal_steps, with_step_advantages
from rlox_grpo.advantages.zero import zero
from rlox_grpo.config.records import AdvantageConfig
from rlox_grpo.config.records.option import is_custom
from rlox_grpo.errors import ConfigError, SampleError, naming_errors
from rlox_grpo.groups import count_turns, find_origin, flag_sampled
from rlox_grpo.rewards.calls import function_name
from rlox_grpo.rewards.import_callable import import_callable
from rlox_grpo.signatures import explain_misfit
from rlox_grpo.types import Completion, Float32Array, ScoredGroup

_Scalar = TypeVar("_Scalar", bound=np.generic)

Advantages: TypeAlias = "Float32Array | list[Float32Array]"
"""The advantages of a step: ``float32 [N]`` of its N completions; ``[N, K]`` of their turns, NaN after the last; or a
list of N arrays ``[T_i]`` of their tokens."""


def make_advantage_fn(config: AdvantageConfig, weights: Sequence[float], moving: MovingBaselines) -> AdvantageFn:
    """Return the advantage function that the options choose: ``advantage_fn``, ``turn_credit``, ``baseline`` and so on.

    Args:
        config: the options.
        weights: one for each reward component.
        moving: the averages of ``baseline="moving"``.

    Raises:
        ConfigError: ``advantage_fn`` cannot be imported, or is not a function.
    """
    if config.advantage_fn is not None:
        return find_advantage_fn(config.advantage_fn)
    return with_step_advantages(make_built_in(config, weights, moving), config, weights)


def find_advantage_fn(advantage_fn: Any) -> AdvantageFn:
    """Return the function of the option ``advantage_fn``: ``"zero"``, ``module:name``, or the function itself.

    Raises:
        ConfigError: the function cannot be imported or is not callable.
    """
    if advantage_fn == "zero":
        return zero
    resolved: Any = import_callable("advantage_fn", advantage_fn) if isinstance(advantage_fn, str) else advantage_fn
    if isinstance(resolved, type) or not callable(resolved):
        raise ConfigError(f"advantage_fn is {resolved!r}: expected a function of ScoredGroups, not a class")
    if misfit := explain_misfit(resolved, "groups"):
        raise ConfigError(f"advantage_fn {function_name(resolved)}: {misfit}; groups is a list of ScoredGroup")
    function: AdvantageFn = resolved
    return function


def make_constant_test(config: AdvantageConfig, weights: Sequence[float]) -> Callable[[ScoredGroup], bool]:
    """Return the function that tells whether all advantages of a group are 0; ``weights``: one for each component.

    With a custom advantage function, the test calls this function with the group alone, so it is only for what has to
    be decided before the advantages of the step are computed; :func:`flag_constant` reads these afterwards. With
    ``"zero"`` it tells whether they would be 0 without that option, which is a fact about the rewards.
    """
    if not is_custom(config.advantage_fn):
        is_constant = make_zero_variance_test(config, weights)
        return lambda scored: has_equal_steps(scored, weights) if scored.step_scores else is_constant(scored)
    function = find_advantage_fn(config.advantage_fn)
    return lambda scored: not has_signal(compute_advantages(function, [scored]), range(len(scored.rewards)))


def compute_advantages(function: AdvantageFn, groups: Sequence[ScoredGroup]) -> Advantages:
    """Call an advantage function and check what it returns.

    The advantage of a completion without a reward may be NaN, and counts as 0.

    Raises:
        SampleError: another number of groups, a wrong shape, a value that is not finite, or a value other than 0 on a
            token that the policy did not sample. The message names the function and the sample.
    """
    name = f"advantage function {function_name(function)}"
    with naming_errors(name):
        returned = function([_make_read_only(scored) for scored in groups])
    if not isinstance(returned, (list, tuple)) or len(returned) != len(groups):
        got = f"{len(returned)} values" if isinstance(returned, (list, tuple)) else type(returned).__name__
        raise SampleError(
            f"{name} returned {got} for {len(groups)} groups: expected a list with the advantages of each group"
        )
    by_token = [isinstance(values, (list, tuple)) and np.ndim(next(iter(values), 0.0)) > 0 for values in returned]
    if any(by_token) and not all(by_token):
        raise SampleError(f"{name} returned advantages of tokens for some groups and not for others")
    if all(by_token):
        for scored, values in zip(groups, returned, strict=True):
            if len(values) != len(scored.rewards):
                raise SampleError(
                    f"{name}, the group of {scored.group.prompt.name}: got {len(values)} arrays for "
                    f"{len(scored.rewards)} completions"
                )
        return [
            _check_tokens(name, scored, index, token_advantages)
            for scored, values in zip(groups, returned, strict=True)
            for index, token_advantages in enumerate(values)
        ]
    checked = [_check_group(name, *pair) for pair in zip(groups, returned, strict=True)]
    if len({values.ndim for values in checked}) > 1:
        raise SampleError(f"{name} returned advantages of turns for some groups and not for others")
    width = max(values.shape[-1] for values in checked) if checked[0].ndim == 2 else 0
    padded = [
        values
        if values.ndim == 1
        else np.pad(values, ((0, 0), (0, width - values.shape[1])), constant_values=np.float32("nan"))
        for values in checked
    ]
    return np.concatenate(padded)


def has_signal(advantages: Advantages, rows: Sequence[int] | NDArray[np.int64] | range) -> bool:
    """Return whether any advantage of the completions ``rows`` is not 0."""
    return any(bool(np.nan_to_num(advantages[int(row)]).any()) for row in rows)


def flag_constant(advantages: Advantages, groups: Sequence[ScoredGroup]) -> list[bool]:
    """Return for each group whether all advantages of its samples are 0.

    Args:
        advantages: those of all completions of ``groups``, in their order.
        groups: with the demonstrations and the replays that were trained beside the samples.
    """
    flags, start = [], 0
    for scored in groups:
        flags.append(not has_signal(advantages, [start + row for row in find_origin(scored, None)]))
        start += len(scored.rewards)
    return flags


def select_rows(advantages: Advantages, rows: NDArray[np.int64]) -> Advantages:
    """Return the advantages of the completions ``rows``."""
    return [advantages[int(row)] for row in rows] if isinstance(advantages, list) else advantages[rows]


def pad_advantages(advantages: Advantages) -> Float32Array:
    """Return the advantages as one array: those of tokens as ``float32 [N, T]``, NaN after the last token."""
    if not isinstance(advantages, list):
        return advantages
    padded = np.full((len(advantages), max(map(len, advantages), default=0)), np.nan, np.float32)
    for row, values in zip(padded, advantages, strict=True):
        row[: len(values)] = values
    return padded


def _make_read_only(scored: ScoredGroup) -> ScoredGroup:
    """Return the group with arrays that cannot be written: copies, and views of the arrays of tokens."""
    rewards = scored.rewards.copy()
    components = {name: values.copy() for name, values in scored.components.items()}
    measures = {name: values.copy() for name, values in scored.measures.items()}
    turn_rewards = None if scored.turn_rewards is None else tuple(values.copy() for values in scored.turn_rewards)
    for values in (rewards, *components.values(), *measures.values(), *(turn_rewards or ())):
        values.flags.writeable = False
    group = replace(scored.group, completions=tuple(map(_lock_completion, scored.group.completions)))
    return replace(
        scored, group=group, rewards=rewards, components=components, measures=measures, turn_rewards=turn_rewards
    )


def _lock_completion(completion: Completion) -> Completion:
    """Return a completion with token ids, log-probs and marks of sampled tokens that cannot be written."""
    return replace(
        completion,
        token_ids=_lock(completion.token_ids),
        log_probs=_lock(completion.log_probs),
        sampled=None if completion.sampled is None else _lock(completion.sampled),
        branches=tuple(map(_lock_completion, completion.branches)),
    )


def _lock(values: NDArray[_Scalar]) -> NDArray[_Scalar]:
    """Return a view of an array, through which it cannot be written."""
    view: NDArray[_Scalar] = values.view()
    view.flags.writeable = False
    return view


def _to_array(values: Any) -> NDArray[Any]:
    """Return a tensor, an array or numbers as an array; values in bfloat16, which NumPy lacks, as float32."""
    if hasattr(values, "detach"):
        tensor = values.detach().cpu()
        return np.asarray(tensor.float() if tensor.is_floating_point() else tensor)
    return np.asarray(values)


def _check_group(name: str, scored: ScoredGroup, values: Any) -> Float32Array:
    """Return the advantages of a group's completions or turns as ``float32 [G]`` or ``[G, K]``."""
    size, where = len(scored.rewards), f"{name}, the group of {scored.group.prompt.name}"
    if isinstance(values, (list, tuple)):
        values = [_to_array(value) for value in values]
        if len({value.shape for value in values}) > 1:
            shapes = ", ".join(dict.fromkeys(str(value.shape) for value in values))
            raise SampleError(f"{where}: got values of the shapes {shapes}, expected {size} numbers")
    array = _to_array(values)
    if array.dtype.kind not in "iuf" or array.ndim not in (1, 2) or len(array) != size:
        raise SampleError(
            f"{where}: got dtype {array.dtype} and shape {array.shape}, expected {size} numbers, one for each "
            f"completion, or a list of {size} arrays, one for each completion with a number for each of its tokens"
        )
    result = array.astype(np.float32)
    if array.ndim == 2:
        _check_turns(where, scored, result)
        return result
    for index, value in enumerate(result):
        if not np.isfinite(value) and not (np.isnan(value) and np.isnan(scored.rewards[index])):
            raise SampleError(
                f"{where}: the advantage of completion {index} is {value}, expected a finite number{_hint(scored)}"
            )
    return np.nan_to_num(result, nan=0.0)


def _check_turns(where: str, scored: ScoredGroup, advantages: Float32Array) -> None:
    """Check advantages of turns ``[G, K]``: finite for each turn of a completion, NaN after its last."""
    for index, (row, completion) in enumerate(zip(advantages, scored.group.completions, strict=True)):
        turns = count_turns(completion)
        if len(row) < turns or not np.isfinite(row[:turns]).all() or not np.isnan(row[turns:]).all():
            raise SampleError(
                f"{where}: got an array of shape {advantages.shape}, a column for each turn, and completion {index} "
                f"has {turns}: expected finite numbers for its turns and NaN after them; for advantages of tokens "
                f"return a list of {len(advantages)} arrays"
            )


def _check_tokens(name: str, scored: ScoredGroup, index: int, values: Any) -> Float32Array:
    """Return the advantages of one completion's tokens as ``float32 [T]``."""
    completion = scored.group.completions[index]
    where = f"{name}, completion {index} of {scored.group.prompt.name}"
    array, length = _to_array(values), len(completion.token_ids)
    if completion.branches:
        raise SampleError(
            f"{where} has branches: advantages of tokens need episodes of one row; return one number for it"
        )
    if array.dtype.kind not in "iuf" or array.shape != (length,):
        raise SampleError(
            f"{where}: got dtype {array.dtype} and shape {array.shape}, expected a number for each of {length} tokens"
        )
    result = array.astype(np.float32)
    if np.isnan(scored.rewards[index]) and np.isnan(result).all():
        return np.zeros(length, np.float32)
    if (wrong := np.flatnonzero(~np.isfinite(result))).size:
        raise SampleError(
            f"{where}: the advantage of token {wrong[0]} is {result[wrong[0]]}, expected a finite number{_hint(scored)}"
        )
    if (wrong := np.flatnonzero((result != 0) & ~flag_sampled(completion))).size:
        raise SampleError(
            f"{where}: the advantage of token {wrong[0]} is {result[wrong[0]]:g}, and the policy did not sample this "
            "token: expected 0 where completion.sampled is False"
        )
    return result


def _hint(scored: ScoredGroup) -> str:
    """Return a hint if a completion of the group has no reward."""
    if not np.isnan(scored.rewards).any():
        return ""
    return "; a completion of the group has no reward (NaN): use np.nanmean and np.nanstd"
