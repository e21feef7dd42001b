"""Replies of the policy with their tool calls, and outcomes of episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlox_grpo.environments.foreign import read_number, show
from rlox_grpo.types import FAILURES, FinishReason, Float32Array, Int64Array


@dataclass(frozen=True)
class ToolCall:
    """A tool call of the policy.

    Attributes:
        name: The name of the tool.
        arguments: Arguments by name, as JSON values.
        id: Unique in the conversation; the tool's message refers to it.
    """

    name: str
    arguments: Mapping[str, Any]
    id: str


@dataclass(frozen=True, eq=False)
class Reply:
    """One reply of the policy.

    Attributes:
        text: The sampled text, decoded without special tokens.
        content: ``text`` without reasoning and tool calls.
        reasoning: The text before ``</think>``, or None.
        tool_calls: The tool calls, in order.
        finish_reason: ``"stop"`` (end token or stop string) or ``"length"`` (truncated).
        token_ids: ``int64 [T]``, the sampled tokens, with the end token.
        log_probs: ``float32 [T]``.
        message: The message in the conversation: role, content, reasoning_content and tool_calls.
        parse_error: Why a tool call cannot be parsed, or None.
        prompt_tokens: Number of tokens of the conversation before the reply.
    """

    text: str
    content: str
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]
    finish_reason: FinishReason
    token_ids: Int64Array
    log_probs: Float32Array
    message: Mapping[str, Any] = field(default_factory=dict)
    parse_error: str | None = None
    prompt_tokens: int = 0


LIMITS = ("max_turns", "max_tokens", "context", "parse_error")
"""Stop reasons caused by the policy; the option ``limit_reward`` is their reward."""

STOP_REASONS = ("completed", *LIMITS, *FAILURES)
"""Stop reasons of episodes. An environment may use others in :class:`Outcome`."""


@dataclass(frozen=True)
class Outcome:
    """The end of an episode.

    Attributes:
        reward: The reward of the whole episode. None: the episode has no score, which differs from the score 0.
        turn_rewards: One reward for each turn, if the environment gives such rewards. The rewards are logged, and
            ``turn_credit`` ``"turn"`` and ``"gae"`` train on them.
        stop_reason: ``"completed"``, or a name chosen by the environment.
        metrics: Numbers by name; the run logs their means as ``environment/<name>``.
    """

    reward: float | None
    turn_rewards: Sequence[float] | None = None
    stop_reason: str = "completed"
    metrics: Mapping[str, float] = field(default_factory=dict)


class EpisodeEnded(Exception):  # noqa: N818  not an error: the episode has no turns left
    """Raised by ``chat.turn`` when a limit ends the episode. Catch it to return an :class:`Outcome` of your own.

    Attributes:
        reason: a stop reason of :data:`LIMITS` or :data:`FAILURES`.
    """

    def __init__(self, reason: str, message: str = "") -> None:
        super().__init__(message or reason)
        self.reason = _read_word(reason, "the reason of EpisodeEnded")


def read_outcome(returned: Any) -> Outcome:
    """Check the return value of an environment: an :class:`Outcome`, a number, or None for an unscored episode.

    Raises:
        TypeError: ``returned`` is something else, or a reward or metric is not a number.
        ValueError: a reward or metric is not finite.
    """
    if not isinstance(returned, Outcome):
        return Outcome(_read_reward(returned, "the episode's reward"))
    turn_rewards = returned.turn_rewards
    if isinstance(turn_rewards, str) or not (turn_rewards is None or hasattr(turn_rewards, "__iter__")):
        raise TypeError(f"turn_rewards is {show(turn_rewards)}: expected a number for each turn, or None")
    if not isinstance(returned.metrics, Mapping):
        raise TypeError(f"metrics is {show(returned.metrics)}: expected a dictionary of numbers by name")
    if turn_rewards is not None:
        turn_rewards = tuple(_read_number(reward, f"turn_rewards[{turn}]") for turn, reward in enumerate(turn_rewards))
    stop_reason = _read_word(returned.stop_reason, "stop_reason")
    metrics = {
        _read_word(str(name), "the name of a metric"): _read_number(value, f"metrics[{name!r}]")
        for name, value in returned.metrics.items()
    }
    return Outcome(_read_reward(returned.reward, "reward"), turn_rewards, stop_reason, metrics)


def _read_word(value: Any, name: str) -> str:
    """Check a text that becomes a part of a metric's name."""
    if not isinstance(value, str) or not value:
        raise TypeError(f"{name} is {value!r}: expected a word")
    if not value.isprintable() or len(value) > 80:
        raise ValueError(f"{name} is {value[:80]!r}: expected at most 80 characters, without line ends")
    return value


def _read_reward(value: Any, name: str) -> float | None:
    return None if value is None else _read_number(value, name)


def _read_number(value: Any, name: str) -> float:
    return read_number(value, f"{name} is", ", an Outcome, or None for an unscored episode")
