"""Advantages: from the rewards of a step's groups to the advantage of each completion, turn or token.

``forms`` has a module for each built-in function, ``choose`` selects one by the options, and ``door`` is the interface,
also for a user's function.
"""

from __future__ import annotations

from rlox_grpo.advantages.component import component_advantages
from rlox_grpo.advantages.gae import gae_advantages
from rlox_grpo.advantages.group import broadcast_advantages, group_advantages
from rlox_grpo.advantages.mean_scaled import mean_scaled_advantages
from rlox_grpo.advantages.turn import turn_advantages

__all__ = [
    "broadcast_advantages",
    "component_advantages",
    "gae_advantages",
    "group_advantages",
    "mean_scaled_advantages",
    "turn_advantages",
]
