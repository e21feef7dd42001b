"""GDPO (arXiv:2601.05242): each reward component is normalised over its group, then the components are summed.

Formula: :func:`rlox_grpo.advantages.component.component_advantages`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlox_grpo.advantages.component import component_advantages
from rlox_grpo.advantages.form import AdvantageFn, choose_baseline, read_deviation_options, split_by_group
from rlox_grpo.advantages.moving import MovingBaselines
from rlox_grpo.config.records import AdvantageConfig
from rlox_grpo.groups import compute_group_offsets
from rlox_grpo.types import ScoredGroup

CHOSEN_BY = {"reward_aggregation": "normalize_then_sum"}


def make(config: AdvantageConfig, weights: Sequence[float], moving: MovingBaselines) -> AdvantageFn:
    """See :class:`rlox_grpo.advantages.forms.Form`."""
    options: dict[str, Any] = {"baseline": choose_baseline(config), **read_deviation_options(config)}

    def advantages(groups: Sequence[ScoredGroup]) -> list[NDArray[Any]]:
        # [F, N], a row for each reward function; NaN where it does not apply
        components = [np.concatenate([group.components[name] for group in groups]) for name in groups[0].components]
        offsets = compute_group_offsets(groups)
        return split_by_group(component_advantages(components, weights, group_offsets=offsets, **options), groups)

    return advantages
