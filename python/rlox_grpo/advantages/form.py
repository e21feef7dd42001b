"""The types of advantage functions, and what their forms share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlox_grpo.advantages.group import Baseline
from rlox_grpo.config.records import AdvantageConfig
from rlox_grpo.groups import compute_group_offsets
from rlox_grpo.types import Float32Array, ScoredGroup

GroupAdvantages: TypeAlias = "NDArray[Any] | list[NDArray[Any]]"
"""The advantages of one group: ``[G]`` of completions, ``[G, K]`` of their turns, or a list of G arrays ``[T_i]``."""

AdvantageFn: TypeAlias = Callable[[Sequence[ScoredGroup]], "Sequence[GroupAdvantages]"]
"""The groups of a step → the advantages of each group."""


def concatenate_rewards(groups: Sequence[ScoredGroup]) -> Float32Array:
    """Return the rewards of all completions, ``float32 [N]``, prompt-major."""
    rewards: Float32Array = np.concatenate([group.rewards for group in groups])
    return rewards


def split_by_group(values: NDArray[Any], groups: Sequence[ScoredGroup]) -> list[NDArray[Any]]:
    """Return the rows of ``values [N, …]`` that belong to each group."""
    return [values[start:stop] for start, stop in pairwise(compute_group_offsets(groups).tolist())]


def over_groups(compute: Callable[[NDArray[Any], NDArray[np.int64]], NDArray[Any]]) -> AdvantageFn:
    """Return the advantage function of ``compute(rewards [N], group_offsets [B + 1])``, which returns ``[N]``."""
    return lambda groups: split_by_group(compute(concatenate_rewards(groups), compute_group_offsets(groups)), groups)


def choose_baseline(config: AdvantageConfig) -> Baseline:
    """Return the baseline within a group: leave-one-out with ``baseline="leave_one_out"``, otherwise the mean."""
    return "leave_one_out" if config.baseline == "leave_one_out" else "mean"


def read_deviation_options(config: AdvantageConfig) -> Mapping[str, Any]:
    """Return ``ddof`` and ``std_epsilon``, the options of a division by the standard deviation."""
    return {"ddof": config.ddof, "std_epsilon": config.std_epsilon}


def read_turn_options(config: AdvantageConfig) -> Mapping[str, Any]:
    """Return the options that say how advantages of turns are divided: by a standard deviation, or not at all."""
    return {"scaling": "none" if config.reward_scaling == "none" else "group", **read_deviation_options(config)}
