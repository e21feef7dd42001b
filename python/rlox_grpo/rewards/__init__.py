"""Rewards: rules, most of them in Rust, support for custom functions, and :func:`score` for rollouts.

Each module of rules lists what it exports in its own ``__all__``.
"""

from __future__ import annotations

from rlox_grpo.rewards import (
    answers,
    arithmetic,
    code,
    formats,
    math_answers,
    published_rewards,
)
from rlox_grpo.rewards.answers import *  # noqa: F403
from rlox_grpo.rewards.arithmetic import *  # noqa: F403
from rlox_grpo.rewards.calls import RewardError, RewardFn
from rlox_grpo.rewards.code import *  # noqa: F403
from rlox_grpo.rewards.formats import *  # noqa: F403
from rlox_grpo.rewards.judge import Judge
from rlox_grpo.rewards.math_answers import *  # noqa: F403
from rlox_grpo.rewards.math_answers import UnreadableGold, unreadable_golds
from rlox_grpo.rewards.published_rewards import *  # noqa: F403
from rlox_grpo.rewards.reward_model import RewardModel
from rlox_grpo.rewards.scoring import check_rewards, reward_weights, score, status_counts
from rlox_grpo.rewards.verdicts import OUTCOMES, STATUSES, Composite, Rule, Verdicts
from rlox_grpo.rewards.workers import InWorkers, in_workers
from rlox_grpo.types import StepScores

__all__ = [
    "OUTCOMES",
    "STATUSES",
    "Composite",
    "InWorkers",
    "Judge",
    "RewardError",
    "RewardFn",
    "RewardModel",
    "Rule",
    "StepScores",
    "UnreadableGold",
    "Verdicts",
    "check_rewards",
    "in_workers",
    "reward_weights",
    "score",
    "status_counts",
    "unreadable_golds",
]
__all__ += answers.__all__
__all__ += arithmetic.__all__
__all__ += code.__all__
__all__ += formats.__all__
__all__ += math_answers.__all__
__all__ += published_rewards.__all__
