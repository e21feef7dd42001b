"""Environments of several turns: what an episode returns, and what it gets from the policy.

An environment is an async function ``episode(row, chat)``; ``docs/guides/several_turns.md`` shows one.
"""

from rlox_grpo.environments.outcome import EpisodeEnded, Outcome
from rlox_grpo.environments.reply import Reply, ToolCall

__all__ = ["EpisodeEnded", "Outcome", "Reply", "ToolCall"]
