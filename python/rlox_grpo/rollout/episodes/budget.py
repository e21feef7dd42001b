"""The limits of an episode, and what it has used of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rlox_grpo.environments import EpisodeEnded


@dataclass(frozen=True)
class Budget:
    """The limits of an episode.

    Attributes:
        max_turns: Replies.
        max_new_tokens: Tokens of a reply.
        max_episode_tokens: Tokens after the first prompt, replies and observations; None: as many as fit the model.
        max_length: Tokens of the whole conversation that the model takes; None when it states no limit.
    """

    max_turns: int
    max_new_tokens: int
    max_episode_tokens: int | None = None
    max_length: int | None = None


class Usage:
    """What an episode has used of its budget.

    Attributes:
        replies: So far.
        pending: Replies that are being sampled.
        given_up: Replies that nobody waited for; each counts as one, so that calls have an end.
    """

    def __init__(self, budget: Budget) -> None:
        self.replies = 0
        self.pending = 0
        self.given_up = 0
        self._budget = budget
        self._reserved = 0  # tokens that pending replies may have
        self._used = 0  # tokens behind the first prompts; what conversations share counts once

    def count_left(self, length: int) -> int | None:
        """Tokens that a conversation of ``length`` tokens may still have; None where nothing limits them."""
        limits = ((self._budget.max_episode_tokens, self._used), (self._budget.max_length, length))
        left = [limit - taken for limit, taken in limits if limit is not None]
        return max(0, min(left)) if left else None

    def check_turn(self) -> None:
        """Raise EpisodeEnded where no reply is left."""
        if self.replies + self.pending + self.given_up >= self._budget.max_turns:
            raise EpisodeEnded("max_turns")

    def find_room(self, length: int, added: int, asked: int | None) -> int:
        """Tokens that the next reply may have.

        Args:
            length: tokens that the model is given.
            added: those of them that count as new; see :meth:`add`.
            asked: the reply's own limit.

        Raises:
            EpisodeEnded: there are none.
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
        """Count tokens behind the first prompt."""
        self._used += tokens

    def give_up(self, tokens: int) -> None:
        """Count a reply that nobody waited for, and not the ``tokens`` that were added for it."""
        self.given_up += 1
        self._used -= tokens

    @contextmanager
    def reserve(self, room: int) -> Iterator[None]:
        """Keep ``room`` tokens for a reply that is being sampled."""
        self.pending += 1
        self._reserved += room
        try:
            yield
        finally:
            self.pending -= 1
            self._reserved -= room


def check_room(max_new_tokens: int | None) -> None:
    """Raise ValueError for a reply's own limit below 1."""
    if max_new_tokens is not None and max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}: expected at least 1")
