"""The conversations of one episode: find the one that a call continues, and list the rows of the update."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

from rlox_grpo.rewards.copies import copy_value
from rlox_grpo.rollout.episodes.conversation import ChatTokens, Conversation, Mark
from rlox_grpo.rollout.episodes.pictures import EpisodePictures
from rlox_grpo.rollout.episodes.template import Template
from rlox_grpo.types import Int64Array, Picture


class Conversations:
    """The first conversation of an episode and its branches.

    Attributes:
        first: the first conversation.
        current: the conversation that ``chat.turn`` continues: the first one, or its latest rewritten form.
    """

    def __init__(self, template: Template, end_ids: Collection[int], pictures: EpisodePictures) -> None:
        self._end_ids, self._pictures = end_ids, pictures
        self.first = self.current = Conversation(template, end_ids, pictures)
        self._all = [self.first]
        self._counts: dict[bytes, int] = {}  # number of branches that begin with the same tokens, by their digest

    def find_longest(self, find: Callable[[Conversation], tuple[Mark, int] | None]) -> tuple[Conversation, int] | None:
        """Find the conversation that a request shares the most messages or tokens with.

        ``find(conversation)`` returns the last shared reply, and the number of shared messages or tokens. If several
        share the same number, one that ends with that reply is preferred, because it needs no branch.

        Returns:
            The conversation, or a new branch that begins after the shared reply; and the number.
        """
        matches = [(conversation, *shared) for conversation in self._all if (shared := find(conversation)) is not None]
        if not matches:
            return None
        conversation, mark, count = max(matches, key=lambda match: (match[2], match[1] == match[0].last_mark))
        return conversation if mark == conversation.last_mark else conversation.fork(mark), count

    def begin(self, template: Template) -> Conversation:
        """Return the first conversation if it is empty, else a new branch with its own prompt."""
        if self.first.messages or self.first.busy:
            return Conversation(template, self._end_ids, self._pictures, -1)
        self.first.template = template
        return self.first

    def add(self, conversation: Conversation, context: Int64Array) -> None:
        """Store ``conversation`` as a new numbered branch that begins with ``context``, unless it is stored already."""
        if conversation.branch >= 0:
            return
        conversation.branch = self._derive_branch(context, conversation.pictures)
        self._all.append(conversation)
        if conversation.rewrites is self.current:
            self.current = conversation

    def give_up(self, conversation: Conversation, *, is_new: bool) -> None:
        """Discard the pending reply of a cancelled call; later calls branch off before it.

        ``is_new`` says that the conversation has no other reply of its own; then the conversation is discarded too.
        """
        conversation.is_cancelled = True
        if not is_new:
            return
        if conversation is self.first:  # replaced by an empty one, with the seed of a branch
            branch = self._derive_branch(conversation.token_ids, conversation.pictures)
            self.first = Conversation(conversation.template, self._end_ids, self._pictures, branch)
            self._all[0] = self.first
            self.current = self.first if conversation is self.current else self.current
            return
        self._all.remove(conversation)
        if conversation is self.current and conversation.rewrites is not None:
            self.current = conversation.rewrites

    def list_rows(self) -> list[tuple[Conversation, ChatTokens]]:
        """List the conversations that have a reply of their own, with their tokens; :attr:`current` is the first.

        If several conversations share a reply, its tokens are marked as sampled only in the first of them, so that
        each reply is trained once.
        """
        rows: list[tuple[Conversation, ChatTokens]] = []
        trained: set[int] = set()
        for conversation in [
            self.current,
            *(conversation for conversation in self._all if conversation is not self.current),
        ]:
            tokens = conversation.list_tokens(trained)
            if tokens is not None:
                rows.append((conversation, tokens))
        return rows

    def list_branch_messages(self) -> list[list[dict[str, Any]]]:
        """Copy the messages of all rows but :attr:`current`, in the order of the rows.

        A conversation that was rewritten or compacted is left out, because what follows it has the same messages.
        """
        rewritten = {id(conversation.rewrites) for conversation in self._all}
        rows = [conversation for conversation, _ in self.list_rows()]
        return [
            [copy_value(message) for message in conversation.transcript]
            for conversation in rows
            if conversation is not self.current and id(conversation) not in rewritten
        ]

    def _derive_branch(self, context: Int64Array, pictures: Sequence[Picture]) -> int:
        """Derive a branch's 47-bit number from its first tokens, so that seeds do not depend on the order of calls."""
        shown = "".join(picture.digest for picture in pictures)
        digest = hashlib.sha256(context.astype("<i8").tobytes() + shown.encode()).digest()
        count = self._counts[digest] = self._counts.get(digest, -1) + 1
        return 1 + (int.from_bytes(hashlib.sha256(digest + count.to_bytes(8, "little")).digest()[:6], "little") >> 1)
