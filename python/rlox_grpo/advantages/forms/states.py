"""GAGPO (arXiv:2605.13217): one advantage for each turn, from temporal differences of state values.

Formula and sources: :func:`rlox_grpo.advantages.gae.gae_advantages`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from rlox_grpo.advantages.form import AdvantageFn, concatenate_rewards, read_turn_options, split_by_group
from rlox_grpo.advantages.gae import gae_advantages
from rlox_grpo.advantages.moving import MovingBaselines
from rlox_grpo.config.records import AdvantageConfig
from rlox_grpo.groups import compute_group_offsets, compute_turn_rewards, number_states
from rlox_grpo.types import ScoredGroup

CHOSEN_BY = {"turn_credit": "gae"}


def make(config: AdvantageConfig, weights: Sequence[float], moving: MovingBaselines) -> AdvantageFn:
    """See :class:`rlox_grpo.advantages.forms.Form`."""
    options: dict[str, Any] = {"discount": config.turn_discount, "trace_decay": config.turn_lambda}
    options |= read_turn_options(config)

    def advantages(groups: Sequence[ScoredGroup]) -> list[NDArray[Any]]:
        rewards, _ = compute_turn_rewards(groups, concatenate_rewards(groups))  # [N, K]
        states = number_states(groups, config.turn_state)  # int64 [N, K], −1 after the last turn
        return split_by_group(gae_advantages(rewards, states, compute_group_offsets(groups), **options), groups)

    return advantages
