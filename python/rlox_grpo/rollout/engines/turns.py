"""Sampling turn by turn: the protocol of engines that episodes can run on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from rlox_grpo.types import Float32Array, Int64Array, Sampling


@dataclass(frozen=True, eq=False)
class TurnRequest:
    """A reply to sample.

    Attributes:
        episode: The prompt's place in its step and the completion's in its group.
        turn: The reply's place in its episode. The draws depend on the seed, ``episode``, ``turn`` and the token's
            position alone; turn 0 draws what a completion of one turn draws.
        token_ids: ``int64 [L]``, the conversation so far. It extends that of the branch's last request.
        max_new_tokens: Longest reply, its end token included.
        stop: Strings that end it, beside those of the sampling parameters.
        branch: 0 in the episode's first conversation; in a branch a number by what it begins with, of at most 47 bits.
            An episode has at most one request for each branch at a time.
        replaces: The branch whose rewritten history begins this one, or None: an engine may go on with its keys and
            values, as far as the tokens are the same. A hint, which changes no token. The built-in engine takes it,
            because it keeps keys and values by branch. vLLM's prefix cache finds equal tokens of any request by their
            blocks, so its sessions do not read it.
        on_tokens: Called with the reply's new tokens as they are sampled, in the thread of ``step``. An engine that
            cannot tell them before the reply ends does not call it.
    """

    episode: tuple[int, int]
    turn: int
    token_ids: Int64Array
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    branch: int = 0
    replaces: int | None = None
    on_tokens: Callable[[Sequence[int]], None] | None = None

    @property
    def draw(self) -> int:
        """Branch and turn as one number, which with seed and episode decides the draws; the turn in branch 0."""
        return (self.branch << 16) + self.turn

    @property
    def key(self) -> tuple[int, int, int]:
        """Episode and branch."""
        return (*self.episode, self.branch)


@dataclass(frozen=True, eq=False)
class SampledTurn:
    """A reply: ``int64 [T]``, ``float32 [T]``, and whether an end token or stop string ended it.

    ``policy_version`` is that of the weights that sampled it, with partial rollouts; None: the engine's.
    """

    token_ids: Int64Array
    log_probs: Float32Array
    stopped: bool
    policy_version: int | None = None


class TurnSession(Protocol):
    """Samples the replies of many episodes together. Requests join at any step.

    Attributes:
        prefilled_tokens: Tokens run through the model to prepare replies; sampled tokens are not among them.
    """

    prefilled_tokens: int

    def submit(self, request: TurnRequest) -> None:
        """Add a request; ValueError for tokens that the model cannot take."""
        ...

    def step(self) -> list[tuple[TurnRequest, SampledTurn]]:
        """Sample a token for every live reply, or start waiting ones; return the replies that ended."""
        ...

    def __len__(self) -> int:
        """Replies under way or waiting."""
        ...

    def drop(self, request: TurnRequest) -> None:
        """Stop a reply under way, or one that waits; nothing where it has ended."""
        ...

    def forget(self, episode: tuple[int, int]) -> None:
        """Free what is kept of an episode that has ended, and drop its replies under way."""
        ...


@runtime_checkable
class TurnEngine(Protocol):
    """A generation engine that samples turn by turn."""

    policy_version: int
    max_length: int | None
    end_ids: tuple[int, ...]

    def open_turns(self, sampling: Sampling, seed: int, max_episodes: int) -> AbstractContextManager[TurnSession]:
        """A session on the current weights for at most so many episodes; within it nothing else uses the engine."""
        ...
