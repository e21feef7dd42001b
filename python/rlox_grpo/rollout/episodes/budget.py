"""Limits of an episode, and counts of the tokens and turns that it has used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from rlox_grpo.environments import EpisodeEnded


@dataclass(frozen=True)
class Budget:
    """The limits of an episode.

    Attributes:
        max_turns: maximum number of replies.
        max_new_tokens: maximum number of tokens of a reply.
        max_episode_tokens: maximum number of tokens of replies and observations; None: only ``max_length``.
        max_length: maximum number of tokens of a conversation that the model supports; None without a limit.
    """

    max_turns: int
    max_new_tokens: int
    max_episode_tokens: int | None = None
    max_length: int | None = None


class Usage:
    """Counts of one episode.

    Attributes:
        replies: replies so far.
        pending: replies that are being sampled.
        cancelled_replies: cancelled replies. Pending replies count as turns, so that the number of calls is limited.
    """

    def __init__(self, budget: Budget) -> None:
        self.replies = 0
        self.pending = 0
        self.cancelled_replies = 0
        self._budget = budget
        self._reserved = 0  # maximum tokens of the pending replies
        self._used = 0  # tokens after the first prompts; shared tokens count once

    def count_left(self, length: int) -> int | None:
        """Return the number of tokens left for a conversation of ``length`` tokens; None without a limit."""
        limits = ((self._budget.max_episode_tokens, self._used), (self._budget.max_length, length))
        left = [limit - taken for limit, taken in limits if limit is not None]
        return max(0, min(left)) if left else None

    def count_turns_left(self) -> int:
        """Return the number of replies that may still be asked for."""
        return max(0, self._budget.max_turns - self.replies - self.pending - self.cancelled_replies)

    def check_turn(self) -> None:
        """Raise EpisodeEnded if no turn is left."""
        if not self.count_turns_left():
            raise EpisodeEnded("max_turns")

    def find_room(self, length: int, added: int, asked: int | None) -> int:
        """Return the maximum number of tokens for the next reply.

        Args:
            length: tokens of the conversation, including new messages.
            added: tokens of the new messages that count against ``max_episode_tokens``.
            asked: limit of this reply, or None.

        Raises:
            EpisodeEnded: no token is left.
        """
        budget = self._budget
        room = min(budget.max_new_tokens, asked or budget.max_new_tokens)
        if budget.max_episode_tokens is not None:
            room = min(room, budget.max_episode_tokens - self._used - self._reserved - added)
            if room < 1:
                raise EpisodeEnded("max_tokens")
        if budget.max_length is not None:
            room = min(room, budget.max_length - length)
            if room < 1:
                raise EpisodeEnded("context")
        return room

    def add(self, tokens: int) -> None:
        """Count tokens after the first prompt."""
        self._used += tokens

    def give_up(self, tokens: int) -> None:
        """Count a cancelled reply, and stop counting the ``tokens`` that were added for it."""
        self.cancelled_replies += 1
        self._used -= tokens

    @contextmanager
    def reserve(self, room: int) -> Iterator[None]:
        """Reserve ``room`` tokens for a reply while it is being sampled."""
        self.pending += 1
        self._reserved += room
        try:
            yield
        finally:
            self.pending -= 1
            self._reserved -= room


def check_room(max_new_tokens: int | None) -> None:
    """Raise ValueError if the limit of a reply is not a whole number of at least 1."""
    if max_new_tokens is not None and (not isinstance(max_new_tokens, (int, np.integer)) or max_new_tokens < 1):
        raise ValueError(f"max_new_tokens is {max_new_tokens}: expected a whole number of at least 1")
