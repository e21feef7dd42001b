"""Advantages from the mean and standard deviation of each group: GRPO (DeepSeekMath, arXiv:2402.03300)."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

import rlox_grpo._native as _native
from rlox_grpo.batch.ragged import to_integers
from rlox_grpo.config.defaults import DDOF, STD_EPSILON

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
    advantage is 0. The advantage is exactly 0 in a group whose valid rewards are all equal, so also in a group of one.
    The advantage is also 0 where a standard deviation would be over at most ``ddof`` valid rewards, such as in a ragged
    group of at most ``ddof`` completions; with ``ddof=2`` that is every group of two.

    Args:
        rewards: ``[N]``, prompt-major. float32 and float64 arrays or CPU tensors keep their type; lists and integers
            become float32.
        group_size: Completions for each prompt; divides N. Give this or ``group_offsets``.
        group_offsets: ``int64 [B + 1]``: group g is ``rewards[group_offsets[g]:group_offsets[g + 1]]``.
        scaling: Divide by the standard deviation of the ``"group"``, of the whole ``"batch"`` (the mean stays the
            group's, as in TRL), or by nothing (``"none"``, Dr. GRPO, arXiv:2503.20783).
        ddof: 1 for the sample standard deviation (TRL, verl), 0 for that of the population.
        std_epsilon: Added to the standard deviation.
        baseline: The group's ``"mean"``, or ``"leave_one_out"``: the mean of the others (RLOO, arXiv:2402.14740).

    Returns:
        ``[N]``, of the type of ``rewards``; a new array.

    Raises:
        TypeError: Rewards that are not real numbers in one dimension, or not exactly one of ``group_size`` and
            ``group_offsets``.
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


def broadcast_advantages(advantages: Any, lengths: Any) -> NDArray[Any]:
    """Repeat the advantage of each completion over its tokens.

    Args:
        advantages: ``[N]``, as `group_advantages` gives them.
        lengths: ``int64 [N]``, tokens of each completion.

    Returns:
        ``[sum of lengths]``, of the type of ``advantages``.

    Raises:
        TypeError: Arguments of another type or shape.
        ValueError: A negative length, a number of lengths other than N, or a sum of lengths that cannot be addressed.
        MemoryError: The result does not fit in memory.
    """
    return _native.broadcast_advantages(_to_floats(advantages, "advantages"), to_integers(lengths, "lengths", 1))


def _to_floats(raw: Any, name: str) -> NDArray[Any]:
    """Return a contiguous float32 or float64 array of one dimension, without a copy if ``raw`` is one already."""
    values: NDArray[Any] = raw if type(raw) is np.ndarray else _to_array(raw, name)
    kind, size = values.dtype.kind, values.dtype.itemsize
    if values.ndim != 1 or not (kind in "iub" or (kind == "f" and size <= 8)):
        raise TypeError(f"{name} has dtype {values.dtype} and shape {values.shape}: {_EXPECTED}")
    dtype = np.float64 if kind == "f" and size == 8 and not isinstance(raw, (list, tuple)) else np.float32
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
    if isinstance(values, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array, whose mask would be lost: give {name}.filled(np.nan)")
    array = np.asarray(values)
    if array.size == 0 and array.ndim == 1:
        return array.astype(np.float32)
    if array.dtype == object and array.ndim == 1 and all(v is None or isinstance(v, (int, float)) for v in values):
        return np.array([np.nan if value is None else value for value in values], dtype=np.float32)
    return array
