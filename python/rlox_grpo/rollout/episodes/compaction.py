"""Compaction: when a conversation is long, the policy summarises it, and the episode goes on from the summary.

::

    before   system | task | reply 1 | message 2 | reply 2 | message 3 | reply 3 | request | summary
    after    system | summary | reply 3 | message 4 | reply 4 …        with ``compact_keep=1``

The summary is a reply like any other: it is sampled, and trained with the advantage of its episode. The conversation
after a compaction is a branch, a further row of the episode, whose prompt is not trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlox_grpo.config.records.episodes import EpisodeConfig
from rlox_grpo.rewards.copies import copy_value
from rlox_grpo.rollout.episodes.messages import Message

HEADING = "Summary of the conversation so far:"
"""First line of the message that holds the summary."""


@dataclass(frozen=True)
class Compaction:
    """When an episode is compacted, and how.

    Attributes:
        at_tokens: maximum number of tokens of a conversation with the next messages to the policy.
        prompt: the message that asks for the summary.
        keep: number of last replies that stay after the summary, with the messages between them.
    """

    at_tokens: int
    prompt: str
    keep: int

    @property
    def request(self) -> dict[str, Any]:
        """The message that asks for the summary."""
        return {"role": "user", "content": self.prompt}

    def shortens(self, messages: Sequence[Message]) -> bool:
        """Whether a conversation has more replies than those that stay."""
        return sum(bool(message["role"] == "assistant") for message in messages) > self.keep

    def rebuild(self, messages: Sequence[Message], summary: str) -> list[dict[str, Any]]:
        """Return the messages of the context after a summary: all system messages, the summary, the last replies.

        System messages from the middle of the conversation come after those of its beginning.
        """
        replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        summarised, stay = messages[: replies[-self.keep]], messages[replies[-self.keep] :]
        head = [message for message in summarised if message["role"] in ("system", "developer")]
        shown = {"role": "user", "content": f"{HEADING}\n\n{summary}"}
        return [copy_value(dict(message)) for message in (*head, shown, *stay)]


@dataclass(frozen=True)
class Compacted:
    """One compaction of an episode, in tokens.

    Attributes:
        before, after: the conversation with the next messages, before it was compacted and after it.
        summary: the sampled summary.
    """

    before: int
    after: int
    summary: int


def draw_compaction(config: EpisodeConfig, seed: int, prompt: int) -> Compaction | None:
    """Return how the episodes of a prompt are compacted; None without ``compact_at_tokens``.

    From a range, the limit is drawn once for each prompt, so that the episodes of a group have the same one.
    """
    at_tokens = config.compact_at_tokens
    if at_tokens is None:
        return None
    if isinstance(at_tokens, tuple):
        state = np.random.default_rng([seed, prompt, *b"compaction"])
        at_tokens = int(state.integers(at_tokens[0], at_tokens[1], endpoint=True))
    return Compaction(at_tokens, config.compact_prompt, config.compact_keep)
