"""Rewards: rules, most of them in Rust; a user's own functions; and :func:`score`, which applies both to rollouts."""

from __future__ import annotations

from rlox_grpo.rewards.answers import Countdown, ExactAnswer, GSM8KAnswer, MultipleChoice, extract_answer
from rlox_grpo.rewards.bad_golds import UnreadableGold, unreadable_golds
from rlox_grpo.rewards.calls import RewardError, RewardFn
from rlox_grpo.rewards.composite import Composite
from rlox_grpo.rewards.formats import TagCount, TagFormat
from rlox_grpo.rewards.lengths import CosineLength, Overlong, ReasoningLength, Repetition
from rlox_grpo.rewards.math_answers import MajorityVote, MathAnswer, math_equal
from rlox_grpo.rewards.published_rewards import PUBLISHED, PublishedAnswer, PublishedCountdown, published
from rlox_grpo.rewards.scoring import check_rewards, reward_weights, score, status_counts
from rlox_grpo.rewards.verdicts import OUTCOMES, STATUSES, Rule, Verdicts
from rlox_grpo.rewards.workers import InWorkers, in_workers

__all__ = [
    "OUTCOMES",
    "PUBLISHED",
    "STATUSES",
    "Composite",
    "CosineLength",
    "Countdown",
    "ExactAnswer",
    "GSM8KAnswer",
    "InWorkers",
    "MajorityVote",
    "MathAnswer",
    "MultipleChoice",
    "Overlong",
    "PublishedAnswer",
    "PublishedCountdown",
    "ReasoningLength",
    "Repetition",
    "RewardError",
    "RewardFn",
    "Rule",
    "TagCount",
    "TagFormat",
    "UnreadableGold",
    "Verdicts",
    "check_rewards",
    "extract_answer",
    "in_workers",
    "math_equal",
    "published",
    "reward_weights",
    "score",
    "status_counts",
    "unreadable_golds",
]
