"""Protocol of engines that sample turn by turn, for episodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeGuard, runtime_checkable

from rlox_grpo.types import Completion, Float32Array, Int32Array, Int64Array, Picture, Sampling, SamplingMask


@dataclass(frozen=True, eq=False)
class TurnRequest:
    """A request for one reply.

    Attributes:
        episode: index of the prompt in its step, and of the completion in its group.
        turn: index of the reply in its conversation. Random draws depend only on the seed, ``episode``, ``branch``,
            ``turn`` and the position of the token. Turn 0 draws like a completion of one turn.
        token_ids: ``int64 [L]``, the conversation so far. The conversation extends the branch's last request.
        max_new_tokens: maximum number of tokens of the reply, including its end token.
        stop: strings that end the reply, in addition to those of the sampling parameters.
        branch: 0 for the first conversation; in a branch, a number of at most 47 bits derived from its first tokens. An
            episode has at most one request per branch at a time.
        replaces: the branch whose rewritten history begins this one, or None. This hint changes no token: the
            built-in engine reuses the keys and values of that branch for the common prefix. vLLM ignores it, because
            its prefix cache finds equal tokens of any request.
        on_tokens: called with new tokens of the reply as they are sampled, in the thread of ``step``. An engine that
            cannot stream does not call it.
        pictures: the pictures of ``token_ids``, in order, in any turn. An engine that cannot read them refuses the
            request.
    """

    episode: tuple[int, int]
    turn: int
    token_ids: Int64Array
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    branch: int = 0
    replaces: int | None = None
    on_tokens: Callable[[Sequence[int]], None] | None = None
    pictures: tuple[Picture, ...] = ()

    @property
    def draw(self) -> int:
        """Branch and turn as one number, which is part of the key of random draws. In branch 0 it is the turn."""
        return (self.branch << 16) + self.turn

    @property
    def key(self) -> tuple[int, int, int]:
        """The pair of episode and branch."""
        return (*self.episode, self.branch)

    @property
    def digests(self) -> tuple[str, ...]:
        """The digests of :attr:`pictures`. Equal token ids mean equal contexts only if these are equal too."""
        return tuple(picture.digest for picture in self.pictures)


@dataclass(frozen=True, eq=False)
class SampledTurn:
    """A sampled reply.

    Attributes:
        token_ids: ``int64 [T]``.
        log_probs: ``float32 [T]``.
        stopped: whether an end token or a stop string ended it; otherwise it is truncated.
        policy_version: version of the weights that sampled it, with partial rollouts; None: the engine's version.
        sampling_mask: the ids from which each token was drawn; None: all, or the engine does not say.
    """

    token_ids: Int64Array
    log_probs: Float32Array
    stopped: bool
    policy_version: int | None = None
    sampling_mask: SamplingMask[Int32Array] | None = None


def read_turn(completion: Completion) -> SampledTurn:
    """Convert a completion to a reply."""
    return SampledTurn(
        completion.token_ids,
        completion.log_probs,
        completion.finish_reason == "stop",
        sampling_mask=completion.sampling_mask,
    )


class TurnSession(Protocol):
    """Samples the replies of many episodes together. Requests join at any step.

    Attributes:
        prefilled_tokens: tokens prefilled for the replies, without the sampled tokens.
    """

    prefilled_tokens: int

    def submit(self, request: TurnRequest) -> None:
        """Add a request. Raises ValueError if the request does not fit the model."""
        ...

    def step(self) -> list[tuple[TurnRequest, SampledTurn]]:
        """Sample a token for every live reply, or start waiting replies; return the complete ones."""
        ...

    def __len__(self) -> int:
        """Number of pending replies."""
        ...

    def drop(self, request: TurnRequest) -> None:
        """Cancel a pending reply; do nothing if it is complete."""
        ...

    def forget(self, episode: tuple[int, int]) -> None:
        """Free the state of a finished episode, and cancel its pending replies."""
        ...


@runtime_checkable
class TurnEngine(Protocol):
    """A generation engine that samples turn by turn."""

    policy_version: int
    max_length: int | None
    end_ids: tuple[int, ...]

    def open_turns(self, sampling: Sampling, seed: int, max_episodes: int) -> AbstractContextManager[TurnSession]:
        """Open the engine's only session, for at most ``max_episodes`` episodes, on the current weights."""
        ...


def runs_turns(engine: object) -> TypeGuard[TurnEngine]:
    """Return whether an engine samples turn by turn; see :func:`rlox_grpo.rollout.engines.is_measured`."""
    return hasattr(engine, "open_turns")
