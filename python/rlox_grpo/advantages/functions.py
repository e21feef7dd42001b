"""Group-relative advantages: from the rewards of B·G completions to one advantage for each completion."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

import rlox_grpo._native as _native
from rlox_grpo.batch.ragged import to_integers
from rlox_grpo.config.defaults import DDOF, STD_EPSILON
from rlox_grpo.groups import (
    compute_group_offsets,
    compute_turn_returns,
    compute_turn_rewards,
    discount_returns,
    has_equal_state_returns,
    has_zero_variance,
    number_states,
)

if TYPE_CHECKING:
    from rlox_grpo.config.records import AdvantageConfig
    from rlox_grpo.types import ScoredGroup

Scaling = Literal["group", "batch", "none"]
Baseline = Literal["mean", "leave_one_out"]

_EXPECTED = "expected float32 or float64 values in one dimension"


def group_advantages(
    rewards: Any,
    group_size: int | None = None,
    *,
    group_offsets: Any = None,
    scaling: Scaling = "group",
    ddof: int = DDOF,
    std_epsilon: float = STD_EPSILON,
    baseline: Baseline = "mean",
) -> NDArray[Any]:
    """Subtract each group's baseline from its rewards and divide by a standard deviation.

    ``A_i = (r_i - mean_g) / (sd + std_epsilon)``, GRPO (arXiv:2402.03300, section 4.1.2); statistics take two passes
    in float64. A NaN reward (a rule that did not apply; None in a list) is left out of every statistic and its
    advantage is 0. The advantage is exactly 0 in a group whose valid rewards are all equal, so also in a group of
    one, and 0 where no more than ``ddof`` rewards are valid for a standard deviation: in a ragged group of at most
    ``ddof`` completions, so with ``ddof=2`` in every group of two.

    Args:
        rewards: ``[N]``, prompt-major. float32 and float64 arrays or CPU tensors keep their type; lists and integers
            become float32.
        group_size: Completions for each prompt; divides N. Give this or ``group_offsets``.
        group_offsets: ``int64 [B + 1]``: group g is ``rewards[group_offsets[g]:group_offsets[g + 1]]``.
        scaling: Divide by the deviation of the ``"group"``, of the whole ``"batch"`` (the mean stays the group's, as in
            TRL), or by nothing (``"none"``, Dr. GRPO, arXiv:2503.20783).
        ddof: 1 for the sample deviation (TRL, verl), 0 for the population's.
        std_epsilon: Added to the deviation.
        baseline: The group's ``"mean"``, or ``"leave_one_out"``: the mean of the others (RLOO, arXiv:2402.14740).

    Returns:
        ``[N]``, of the type of ``rewards``; a new array.

    Raises:
        TypeError: Rewards that are not real numbers in one dimension, or not exactly one way to group them.
        ValueError: An infinite reward, groups that do not fit the rewards, an unknown choice.
    """
    if (group_size is None) == (group_offsets is None):
        raise TypeError("give either group_size or group_offsets")
    if ddof < 0:
        raise ValueError(f"ddof is {ddof}: it is not negative")
    values = _to_floats(rewards, "rewards")
    if group_offsets is not None:
        offsets = to_integers(group_offsets, "group_offsets", 1)
        return _native.group_advantages(values, 0, offsets, scaling, baseline, ddof, std_epsilon)
    if group_size is None or group_size < 1:
        raise ValueError(f"group_size is {group_size}: a group holds at least one")
    return _native.group_advantages(values, group_size, None, scaling, baseline, ddof, std_epsilon)


def component_advantages(
    components: Any,
    weights: Sequence[float],
    group_size: int | None = None,
    *,
    group_offsets: Any = None,
    ddof: int = DDOF,
    std_epsilon: float = STD_EPSILON,
    baseline: Baseline = "mean",
) -> NDArray[np.float32]:
    """Normalize each reward component, then sum: GDPO (arXiv:2601.05242), TRL's ``normalize_then_sum``.

    ``a_ik`` is :func:`group_advantages` of component k, scaled by its group's deviation; then ``s_i = sum_k w_k a_ik``
    and ``A_i = s_i / (sd(s) + std_epsilon)``, sd over the whole batch. So every component has the same influence,
    whatever its variance. TRL also subtracts the mean of s, which is 0 up to rounding because every ``a_ik`` sums to 0
    in its group; without that, a group whose components are all constant has advantages of exactly 0.

    Args:
        components: ``[F, N]``, prompt-major; NaN where a component does not apply: it then adds nothing. A row with
            no component has advantage 0 and is left out of the batch's deviation. With no more than ``ddof`` rows in
            that deviation, every advantage is 0.
        weights: ``F``.
        group_size, group_offsets, ddof, std_epsilon, baseline: As in :func:`group_advantages`.

    Returns:
        ``float32 [N]``.
    """
    values = np.atleast_2d(np.asarray(components, dtype=np.float64))
    if values.ndim != 2 or len(values) != len(weights):
        raise ValueError(f"components has shape {values.shape}, expected [{len(weights)}, N], a row for each weight")
    options: dict[str, Any] = {"ddof": ddof, "std_epsilon": std_epsilon, "baseline": baseline}
    options |= {"group_size": group_size, "group_offsets": group_offsets}
    normalised = [group_advantages(component, **options) for component in values]
    summed = np.tensordot(np.asarray(weights, dtype=np.float64), np.stack(normalised), axes=1)
    # Rows to which no component applies have no part in the deviation of the batch.
    applies = ~np.isnan(values).all(axis=0)
    if applies.sum() <= ddof:  # no standard deviation; epsilon alone would be no scale
        return np.zeros(len(summed), np.float32)
    spread = float(summed[applies].std(ddof=ddof))
    return (np.where(applies, summed, 0.0) / (spread + std_epsilon)).astype(np.float32)


def mean_scaled_advantages(
    rewards: NDArray[Any], group_offsets: NDArray[np.int64], *, std_epsilon: float = STD_EPSILON
) -> NDArray[np.float32]:
    """Subtract each group's mean reward and divide by it: MaxRL (arXiv:2602.02710, Algorithm 1).

    ``A_i = (r_i - mean_g) / (mean_g + std_epsilon)``. For rewards of 0 and 1 the policy gradient is then the mean score
    of the correct completions minus that of all: an estimate of the gradient of the log of the pass rate, truncated at
    the order of the group's size. A correct completion of a hard prompt weighs more than under GRPO: with 1 of 4
    correct ``A = 3``, where GRPO has 1.5.

    Args:
        rewards: ``[N]``, prompt-major, each at least 0; NaN is left out of the mean, and its advantage is 0.
        group_offsets: ``int64 [B + 1]``.
        std_epsilon: Added to the mean.

    Returns:
        ``float32 [N]``; 0 in a group without any reward.

    Raises:
        ValueError: A negative reward; names its row.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if negative := np.flatnonzero(values < 0).tolist():
        raise ValueError(
            f"reward_scaling='mean' needs rewards of at least 0, and row {negative[0]} has {values[negative[0]]:g}: "
            "MaxRL's weights are those of pass rates; use another reward_scaling, or add a constant to the reward"
        )
    advantages = np.zeros(len(values))
    for start, stop in pairwise(group_offsets.tolist()):
        group = values[start:stop]
        valid = ~np.isnan(group)
        mean = float(group[valid].mean()) if valid.any() else 0.0
        if mean > 0:
            advantages[start:stop][valid] = (group[valid] - mean) / (mean + std_epsilon)
    return advantages.astype(np.float32)


def turn_advantages(
    returns: NDArray[Any],
    turns: NDArray[np.int64],
    group_offsets: NDArray[np.int64],
    *,
    scaling: Literal["group", "none"] = "group",
    ddof: int = DDOF,
    std_epsilon: float = STD_EPSILON,
    baseline: Baseline = "mean",
) -> NDArray[np.float32]:
    """Advantage of each turn: its return minus the baseline of the same turn over the group.

    An episode that has ended counts as a return of 0 in the later turns' baselines. So a baseline does not depend on
    which episodes of the group are still running, which is up to the policy; a mean over the running ones would weight
    turns by how many they are, and its expected gradient is not that of the reward. With ``scaling="none"`` and
    ``"leave_one_out"`` the gradient is unbiased; with ``"mean"`` it is (G − 1) / G of that.

    ``scaling="group"`` divides a group by one number, the deviation of its returns from their baselines over all turns
    up to its longest episode's. With one turn each this is :func:`group_advantages`.

    Args:
        returns: ``float64 [N, K]``, of :func:`rlox_grpo.groups.compute_turn_returns`; rows of NaN are left out of every
            statistic, and their advantages are 0.
        turns: ``int64 [N]``, the turns of each episode.
        group_offsets: ``int64 [B + 1]``.
        scaling, ddof, std_epsilon, baseline: as in :func:`group_advantages`.

    Returns:
        ``float32 [N, K]``, NaN after an episode's last turn.
    """
    advantages = np.zeros(returns.shape)
    for start, stop in pairwise(group_offsets.tolist()):
        valid = np.arange(start, stop)[~np.isnan(returns[start:stop, 0])]
        # [valid, turns of the longest]. Episodes that have ended have the return 0 there; see the docstring.
        own = returns[valid, : turns[valid].max(initial=1)]
        count = len(valid)
        if count == 0 or (own.max(axis=0) == own.min(axis=0)).all():
            continue
        centred = own - own.mean(axis=0)
        # r_i − mean of the others = (r_i − mean of all) · G / (G − 1)
        scale = count / (count - 1) if baseline == "leave_one_out" else 1.0
        if scaling == "group":
            freedom = (count - ddof) * own.shape[1]  # one mean is estimated for each turn
            deviation = np.sqrt((centred**2).sum() / freedom) + std_epsilon if freedom > 0 else 0.0
            scale = scale / deviation if deviation > 0 else 0.0
        advantages[valid, : own.shape[1]] = centred * scale
    advantages[np.arange(returns.shape[1]) >= turns[:, None]] = np.nan
    return advantages.astype(np.float32)


def gae_advantages(
    rewards: NDArray[np.float64],
    states: NDArray[np.int64],
    group_offsets: NDArray[np.int64],
    *,
    discount: float,
    trace_decay: float,
    scaling: Literal["group", "none"] = "group",
    ddof: int = DDOF,
    std_epsilon: float = STD_EPSILON,
) -> NDArray[np.float32]:
    """Generalised advantage of each turn, with values of states from the group: GAGPO (arXiv:2605.13217).

    ``V(s)`` is the mean of the discounted returns G_k of all turns of the group in the state s, and 0 after the last
    turn. Then δ_k = r_k + discount · V(s_{k+1}) − V(s_k) and A_k = δ_k + discount · trace_decay · A_{k+1} (GAE,
    arXiv:1506.02438, eq. 16). With ``trace_decay=1`` this is G_k − V(s_k).

    ``scaling="group"`` subtracts the mean of all turns of the group and divides by their deviation. With one turn each
    this is :func:`group_advantages`.

    Args:
        rewards: ``float64 [N, K]``, of :func:`rlox_grpo.groups.compute_turn_rewards`; rows of NaN are left out of every
            statistic, and their advantages are 0.
        states: ``int64 [N, K]``, of :func:`rlox_grpo.groups.number_states`.
        group_offsets: ``int64 [B + 1]``.
        discount: γ.
        trace_decay: λ.
        scaling, ddof, std_epsilon: as in :func:`group_advantages`.

    Returns:
        ``float32 [N, K]``, NaN after an episode's last turn.
    """
    returns = discount_returns(rewards, discount)
    valid = (states >= 0) & ~np.isnan(returns)
    values = np.zeros_like(returns)
    values[valid] = _mean_by_state(returns[valid], states[valid])
    # δ = (r + discount · V') − V in the order of the returns: exactly 0 where the returns of each state are equal.
    advantages = np.where(valid, rewards, 0.0)
    advantages[:, :-1] += discount * values[:, 1:]
    advantages -= values
    for turn in range(advantages.shape[1] - 2, -1, -1):
        advantages[:, turn] += discount * trace_decay * advantages[:, turn + 1]
    for start, stop in pairwise(group_offsets.tolist() if scaling == "group" else ()):
        place = valid[start:stop]
        own = advantages[start:stop][place]
        spread = float(own.std(ddof=ddof)) if len(own) > ddof and own.max() > own.min() else 0.0
        scaled = (own - own.mean()) / (spread + std_epsilon) if spread > 0 else np.zeros_like(own)
        advantages[start:stop][place] = scaled
    advantages[states < 0] = np.nan
    return advantages.astype(np.float32)


def _mean_by_state(returns: NDArray[np.float64], states: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return for each turn the mean return of its state, ``float64 [M]``; equal returns have exactly that mean."""
    _, first, place, count = np.unique(states, return_index=True, return_inverse=True, return_counts=True)
    # The mean of the differences: it is exactly 0 for equal returns, so that their advantages are.
    differences = returns - returns[first][place]
    return returns[first][place] + (np.bincount(place, weights=differences) / count)[place]


def make_advantages(
    config: AdvantageConfig, weights: Sequence[float]
) -> Callable[[NDArray[Any], NDArray[np.int64], Mapping[str, NDArray[Any]]], NDArray[np.float32]]:
    """Return the function from rewards ``[N]``, group offsets ``[B + 1]`` and components to advantages ``float32 [N]``.

    Args:
        config: the options.
        weights: one for each reward component.
    """
    baseline: Baseline = "leave_one_out" if config.baseline == "leave_one_out" else "mean"
    options: dict[str, Any] = {"ddof": config.ddof, "std_epsilon": config.std_epsilon}

    def advantages(
        rewards: NDArray[Any], offsets: NDArray[np.int64], components: Mapping[str, NDArray[Any]]
    ) -> NDArray[np.float32]:
        if config.baseline == "batch":  # treat the batch as one group
            scaling: Scaling = "group" if config.reward_scaling == "batch" else "none"
            return group_advantages(rewards, len(rewards), scaling=scaling, **options)
        if config.baseline == "optimal_token":  # the learner replaces them once it has the forward pass
            return group_advantages(rewards, group_offsets=offsets, scaling="none")
        if config.reward_aggregation == "normalize_then_sum":
            own = list(components.values())
            return component_advantages(own, weights, group_offsets=offsets, baseline=baseline, **options)
        if config.reward_scaling == "mean":
            return mean_scaled_advantages(rewards, offsets, std_epsilon=config.std_epsilon)
        if config.reward_scaling == "whiten":
            centred = group_advantages(rewards, group_offsets=offsets, scaling="none", baseline=baseline)
            valid = centred[~np.isnan(rewards)].astype(np.float64)
            if len(valid) <= config.ddof:  # no standard deviation; epsilon alone would be no scale
                return np.zeros(len(centred), np.float32)
            spread = float(valid.std(ddof=config.ddof))
            scaled: NDArray[np.float32] = (centred / max(spread + config.std_epsilon, 1e-30)).astype(np.float32)
            return scaled
        return group_advantages(
            rewards, group_offsets=offsets, scaling=config.reward_scaling, baseline=baseline, **options
        )

    return _without_losers(advantages) if config.negative_advantages == "zero" else advantages


def make_turn_advantages(
    config: AdvantageConfig,
) -> Callable[[Sequence[ScoredGroup], NDArray[np.float32]], NDArray[np.float32]]:
    """Return the function from groups and their rewards ``[N]`` to the advantages of turns, ``float32 [N, K]``.

    It is :func:`turn_advantages` or :func:`gae_advantages` with the options of ``config``, by ``turn_credit``.
    """
    options: dict[str, Any] = {
        "scaling": "none" if config.reward_scaling == "none" else "group",
        "ddof": config.ddof,
        "std_epsilon": config.std_epsilon,
    }

    def of_turns(groups: Sequence[ScoredGroup], rewards: NDArray[np.float32]) -> NDArray[np.float32]:
        baseline: Baseline = "leave_one_out" if config.baseline == "leave_one_out" else "mean"
        returns, turns = compute_turn_returns(groups, rewards)
        return turn_advantages(returns, turns, compute_group_offsets(groups), baseline=baseline, **options)

    def of_states(groups: Sequence[ScoredGroup], rewards: NDArray[np.float32]) -> NDArray[np.float32]:
        return gae_advantages(
            compute_turn_rewards(groups, rewards)[0],
            number_states(groups, config.turn_state),
            compute_group_offsets(groups),
            discount=config.turn_discount,
            trace_decay=config.turn_lambda,
            **options,
        )

    advantages = of_states if config.turn_credit == "gae" else of_turns
    return _without_losers(advantages) if config.negative_advantages == "zero" else advantages


def make_zero_variance_test(config: AdvantageConfig) -> Callable[[ScoredGroup], bool]:
    """Return the function that tells whether all advantages of a group are 0, by ``turn_credit``."""
    if config.turn_credit == "gae":
        return lambda scored: has_equal_state_returns(scored, config.turn_discount, config.turn_state)
    return lambda scored: has_zero_variance(scored, by_turn=config.turn_credit == "turn")


def _without_losers(advantages: Callable[..., NDArray[np.float32]]) -> Callable[..., NDArray[np.float32]]:
    """Return the function with 0 for its negative values: WAPO, arXiv:2606.16154. NaN stays NaN."""
    return lambda *arguments: np.maximum(advantages(*arguments), np.float32(0))


def broadcast_advantages(advantages: Any, lengths: Any) -> NDArray[Any]:
    """Repeat the advantage of each completion over its tokens.

    Args:
        advantages: ``[N]``, as `group_advantages` gives them.
        lengths: ``int64 [N]``, tokens of each completion.

    Returns:
        ``[sum of lengths]``, of the type of ``advantages``.

    Raises:
        TypeError: Arguments of another type or shape.
        ValueError: A negative length, lengths of another number, or a sum of lengths that cannot be addressed.
        MemoryError: The result does not fit in memory.
    """
    return _native.broadcast_advantages(_to_floats(advantages, "advantages"), to_integers(lengths, "lengths", 1))


def _to_floats(given: Any, name: str) -> NDArray[Any]:
    """Return a contiguous float32 or float64 array of one dimension, without a copy if ``given`` is one already."""
    values: NDArray[Any] = given if type(given) is np.ndarray else _to_array(given, name)
    kind, size = values.dtype.kind, values.dtype.itemsize
    if values.ndim != 1 or not (kind in "iub" or (kind == "f" and size <= 8)):
        raise TypeError(f"{name} has dtype {values.dtype} and shape {values.shape}: {_EXPECTED}")
    dtype = np.float64 if kind == "f" and size == 8 and not isinstance(given, (list, tuple)) else np.float32
    if values.dtype == dtype and values.flags.c_contiguous and values.flags.aligned:
        return values
    return np.array(values, dtype=dtype, order="C")


def _to_array(values: Any, name: str) -> NDArray[Any]:
    if hasattr(values, "detach"):  # a torch tensor, without importing torch
        values = values.detach()
        if values.device.type != "cpu":
            raise TypeError(f"{name} is on {values.device}: the kernels take CPU tensors")
        if values.is_floating_point() and values.dtype.itemsize < 4:
            values = values.float()
        return np.asarray(values.numpy())
    array = np.asarray(values)
    if array.size == 0 and array.ndim == 1:
        return array.astype(np.float32)
    if array.dtype == object and array.ndim == 1 and all(v is None or isinstance(v, (int, float)) for v in values):
        return np.array([np.nan if value is None else value for value in values], dtype=np.float32)
    return array
