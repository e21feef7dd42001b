"""Advantages of each reward component, summed: GDPO (arXiv:2601.05242)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlox_grpo.advantages.group import Baseline, group_advantages
from rlox_grpo.config.defaults import DDOF, STD_EPSILON


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

    ``a_ik`` is :func:`group_advantages` of component k, scaled by its group's standard deviation. Then
    ``s_i = sum_k w_k a_ik`` and ``A_i = s_i / (sd(s) + std_epsilon)``, sd over the whole batch. Every component
    therefore has the same influence, whatever its variance. TRL also subtracts the mean of s, which is 0 up to rounding
    because every ``a_ik`` sums to 0 in its group; without that, a group whose components are all constant has
    advantages of exactly 0.

    Args:
        components: ``[F, N]``, prompt-major; NaN where a component does not apply: it then adds nothing. A row with
            no component has advantage 0 and is left out of the batch's standard deviation. If at most ``ddof`` rows are
            left, every advantage is 0.
        weights: ``F``; a component of weight 0 counts in nothing.
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
    applies = ~np.isnan(values[np.asarray(weights) != 0]).all(axis=0)
    if applies.sum() <= ddof:  # no standard deviation; epsilon alone would be no scale
        return np.zeros(len(summed), np.float32)
    spread = float(summed[applies].std(ddof=ddof))
    return (np.where(applies, summed, 0.0) / (spread + std_epsilon)).astype(np.float32)
