"""Environments of several turns: replies of the policy, outcomes of episodes, and adapters for other packages.

An environment is an async function ``episode(row, chat)``; ``docs/guides/several_turns.md`` shows one. The functions
``from_…`` adapt environments of other packages (``docs/guides/other_environments.md``).
"""

from rlox_grpo.environments.gymnasium import from_gymnasium
from rlox_grpo.environments.openenv import from_openenv
from rlox_grpo.environments.openrlhf import from_openrlhf
from rlox_grpo.environments.outcome import EpisodeEnded, Outcome, Reply, ToolCall
from rlox_grpo.environments.skyrl_gym import from_skyrl_gym
from rlox_grpo.environments.verifiers import from_verifiers

__all__ = [
    "EpisodeEnded",
    "Outcome",
    "Reply",
    "ToolCall",
    "from_gymnasium",
    "from_openenv",
    "from_openrlhf",
    "from_skyrl_gym",
    "from_verifiers",
]
