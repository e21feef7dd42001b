"""How an episode ends: a checked outcome, or what a limit or a failure pays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlox_grpo.config.records.episodes import EpisodeConfig
from rlox_grpo.environments import Outcome
from rlox_grpo.environments.outcome import LIMITS, read_outcome
from rlox_grpo.rollout.episodes.adapters import Environment


def check_outcome(returned: Any, turns: int, ended: str | None) -> Outcome:
    """Read what an environment returned after ``turns`` replies; ``ended`` is the limit that had ended its chat.

    Raises:
        ValueError: no outcome, an episode without a reply, or rewards of another number of turns.
    """
    outcome = read_outcome(returned)
    if outcome.turn_rewards is not None and len(outcome.turn_rewards) != turns:
        raise ValueError(f"turn_rewards has {len(outcome.turn_rewards)} values for {turns} turns")
    if not turns:
        raise ValueError("it ended before the policy had a turn: call chat.turn at least once")
    if ended is not None and outcome.stop_reason == "completed":
        return replace(outcome, stop_reason=ended)
    return outcome


def end_episode(environment: Environment, config: EpisodeConfig, reason: str) -> Outcome:
    """The outcome of an episode that a limit or a failure ended."""
    paid = config.limit_reward if reason in LIMITS else config.failure_reward
    return Outcome(paid if environment.has_reward else None, stop_reason=reason)


def check_columns(environment: Environment, row: Mapping[str, Any], name: str, advice: str = "") -> None:
    """Raise ValueError where ``row``, called ``name`` in the message, lacks a column that the environment needs."""
    for needed in environment.needs:
        if needed not in row:
            raise ValueError(
                f"{name} has no column {needed!r}, which {environment.name} needs; it has "
                f"{', '.join(map(repr, row)) or 'none'}{advice}"
            )
