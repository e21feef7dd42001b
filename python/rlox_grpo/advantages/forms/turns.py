"""One advantage for each turn of an episode: the rewards from that turn on, minus the baseline of the same turn.

Formula and sources: :func:`rlox_grpo.advantages.turn.turn_advantages`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from rlox_grpo.advantages.form import (
    AdvantageFn,
    choose_baseline,
    concatenate_rewards,
    read_turn_options,
    split_by_group,
)
from rlox_grpo.advantages.moving import MovingBaselines
from rlox_grpo.advantages.turn import turn_advantages
from rlox_grpo.config.records import AdvantageConfig
from rlox_grpo.groups import compute_group_offsets, compute_turn_returns
from rlox_grpo.types import ScoredGroup

CHOSEN_BY = {"turn_credit": "turn"}


def make(config: AdvantageConfig, weights: Sequence[float], moving: MovingBaselines) -> AdvantageFn:
    """See :class:`rlox_grpo.advantages.forms.Form`."""
    options: dict[str, Any] = {"baseline": choose_baseline(config), **read_turn_options(config)}

    def advantages(groups: Sequence[ScoredGroup]) -> list[NDArray[Any]]:
        returns, turns = compute_turn_returns(groups, concatenate_rewards(groups))  # [N, K] and [N]
        return split_by_group(turn_advantages(returns, turns, compute_group_offsets(groups), **options), groups)

    return advantages
