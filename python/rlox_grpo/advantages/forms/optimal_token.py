"""OTB (arXiv:2602.07078): a baseline for each token position of a group.

The baselines need squared norms of scores, from a forward pass. This form therefore returns the rewards minus the
group's mean, which is enough to find groups without signal. :mod:`rlox_grpo.update.token_baseline` has the formula of
the baselines and replaces these advantages.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlox_grpo.advantages.form import AdvantageFn, over_groups
from rlox_grpo.advantages.group import group_advantages
from rlox_grpo.advantages.moving import MovingBaselines
from rlox_grpo.config.records import AdvantageConfig

CHOSEN_BY = {"baseline": "optimal_token"}


def make(config: AdvantageConfig, weights: Sequence[float], moving: MovingBaselines) -> AdvantageFn:
    """See :class:`rlox_grpo.advantages.forms.Form`."""
    return over_groups(lambda rewards, offsets: group_advantages(rewards, group_offsets=offsets, scaling="none"))
