"""The conversations of one episode: which one a call continues, and the rows that they make."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from typing import Any

from rlox_grpo.rollout.episodes.line import ChatTokens, Line, Mark
from rlox_grpo.rollout.episodes.template import Template
from rlox_grpo.types import Int64Array


class Conversations:
    """The first conversation of an episode, and the branches that have a reply.

    Attributes:
        current: The conversation that ``chat.turn`` goes on with: the first one, or the last that rewrote it.
    """

    def __init__(self, template: Template, end_ids: Collection[int]) -> None:
        self._end_ids = end_ids
        self._first = self.current = Line(template, end_ids)
        self._lines = [self._first]
        self._counts: dict[bytes, int] = {}  # how many branches began with the same tokens

    @property
    def prompt_messages(self) -> int:
        """How many messages make up the first prompt."""
        return self._first.prompt_messages

    def find_longest(self, find: Callable[[Line], tuple[Mark, int] | None]) -> tuple[Line, Mark, int] | None:
        """The line and the reply that a conversation extends furthest; one that can go on there comes first.

        ``find`` returns the reply of a line, and how much of the conversation it covers.
        """
        found = [(line, *covered) for line in self._lines if (covered := find(line)) is not None]
        return max(found, key=lambda one: (one[2], one[1] == one[0].last_mark), default=None)

    def go_on(self, line: Line, mark: Mark) -> Line:
        """``line`` where it ends with the reply ``mark``, else a branch that begins there."""
        return line if mark == line.last_mark else line.fork(mark, -1)

    def begin(self, template: Template) -> Line:
        """The first conversation while it is empty, else a branch with a prompt of its own."""
        if self._first.messages or self._first.busy:
            return Line(template, self._end_ids, -1)
        self._first.template = template
        return self._first

    def add(self, line: Line, context: Int64Array) -> None:
        """Number a new branch, which begins with ``context``, and keep it; a known line stays as it is."""
        if line.branch >= 0:
            return
        line.branch = self._derive_branch(context)
        self._lines.append(line)
        if line.rewrites is self.current:
            self.current = line

    def give_up(self, line: Line, *, is_new: bool) -> None:
        """Leave out a reply that nobody waits for.

        Later calls go on in a branch, as the engine may still be at that reply. ``is_new``: the line had no other reply
        of its own, and is left out too.
        """
        line.given_up = True
        if not is_new:
            return
        if line is self._first:  # it begins anew, with the draws of a branch
            self._first = Line(line.template, self._end_ids, self._derive_branch(line.token_ids))
            self._lines[0] = self._first
            self.current = self._first if line is self.current else self.current
            return
        self._lines.remove(line)
        if line is self.current and line.rewrites is not None:
            self.current = line.rewrites

    def list_rows(self) -> list[tuple[Line, ChatTokens]]:
        """The lines that have a reply of their own with their tokens, that of ``chat.turn`` first.

        A reply that several lines share is sampled in the first of them and context in the others.
        """
        rows: list[tuple[Line, ChatTokens]] = []
        trained: set[int] = set()
        for line in [self.current, *(line for line in self._lines if line is not self.current)]:
            found = line.list_tokens(trained)
            if found is not None:
                rows.append((line, found[0]))
                trained.update(found[1])
        return rows

    def list_branch_messages(self) -> list[list[dict[str, Any]]]:
        """The conversations beside that of ``chat.turn``, in the order of the rows; copies.

        A conversation that the chat template rewrote when it went on is left out: the one that it became holds it.
        """
        rewritten = {id(line.rewrites) for line in self._lines}
        rows = [line for line, _ in self.list_rows()]
        return [
            [dict(message) for message in line.messages]
            for line in rows
            if line is not self.current and id(line) not in rewritten
        ]

    def _derive_branch(self, context: Int64Array) -> int:
        """A number of 47 bits by what a branch begins with, so that its draws do not depend on the order of calls."""
        digest = hashlib.sha256(context.astype("<i8").tobytes()).digest()
        count = self._counts[digest] = self._counts.get(digest, -1) + 1
        return 1 + (int.from_bytes(hashlib.sha256(digest + count.to_bytes(8, "little")).digest()[:6], "little") >> 1)
