"""State of partial rollouts: the recorded replies of unfinished episodes, and the gate between two rounds.

Between two steps, only the replies of an episode are stored. In the next step its environment runs again from the
beginning and gets the recorded replies, until it asks for a reply that has not been sampled. The state of an
environment is therefore never saved, and a resumed run equals an uninterrupted one.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rlox_grpo.groups import find_stale_tokens, flag_sampled, list_rows
from rlox_grpo.rollout.engines.turns import SampledTurn, TurnRequest
from rlox_grpo.rollout.episodes.conversation import ChatTokens
from rlox_grpo.rollout.episodes.groups import Played
from rlox_grpo.rollout.serialize import decode_episode, decode_fields, decode_group, encode_fields, encode_group
from rlox_grpo.rollout.stored_pictures import decode_pictures, encode_pictures
from rlox_grpo.types import Prompt, RolloutGroup

if TYPE_CHECKING:
    from rlox_grpo.prompts.pictures import PictureReader

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class RecordedReply:
    """A recorded reply of an unfinished episode.

    Attributes:
        context: digest of the tokens before the reply, of their pictures and of its stop strings.
        turn: the tokens of the reply, their log-probs, and the policy version that sampled it.
    """

    context: str
    turn: SampledTurn


@dataclass(eq=False)
class StartedEpisode:
    """The state of an episode between two steps.

    Attributes:
        replies: recorded replies by branch and turn; see :class:`rlox_grpo.rollout.engines.turns.TurnRequest`.
        seconds: the part of ``episode_timeout`` that the episode has used.
        played: the rows and the outcome; None until the episode has finished.
    """

    replies: dict[tuple[int, int], RecordedReply] = field(default_factory=dict)
    seconds: float = 0.0
    played: Played | None = None


@dataclass(eq=False)
class StartedGroup:
    """The episodes of one prompt.

    Attributes:
        prompt: the prompt.
        draw: index of the prompt among all prompts that the run has drawn; part of the key of random draws.
        episodes: the episodes of the group.
        group: the group; None until all episodes have finished.
    """

    prompt: Prompt
    draw: int
    episodes: list[StartedEpisode]
    group: RolloutGroup | None = None


class Gate:
    """Admits ``turns`` replies of each episode per round, and holds further requests until the next round.

    The first round admits no reply: continued episodes first get their recorded replies, so that the decoded batches
    do not depend on how long environments take.

    Attributes:
        waiting: the requests that wait for the next round, with their times of arrival.
    """

    def __init__(self, turns: int, policy_version: int, started: Mapping[tuple[int, int], StartedEpisode]) -> None:
        self.waiting: dict[TurnRequest, float] = {}
        self._turns, self._version, self._started = turns, policy_version, started
        self._left: dict[tuple[int, int], int] = {}
        self._has_warned = False

    def find(self, request: TurnRequest) -> SampledTurn | None:
        """Return the recorded reply to a request; None if there is none, or if the tokens before it have changed."""
        replies = self._started[request.episode].replies
        recorded = replies.get((request.branch, request.turn))
        if recorded is None:
            return None
        if recorded.context == _digest(request) and len(recorded.turn.token_ids) <= request.max_new_tokens:
            return recorded.turn
        del replies[request.branch, request.turn]
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "an environment is not deterministic: when an episode was continued, the conversation before its turn "
                "%d differed from the previous step, so its replies from there on are sampled again. Draw random "
                "numbers from chat.seed, and see partial_rollout_turns in docs/guides/async.md",
                request.turn,
            )
        return None

    def admit(self, request: TurnRequest) -> bool:
        """Whether the request may be sampled in this round; otherwise it is added to :attr:`waiting`."""
        left = self._left.get(request.episode, 0)
        if left:
            self._left[request.episode] = left - 1
        else:
            self.waiting[request] = time.monotonic()
        return left > 0

    def record(self, request: TurnRequest, turn: SampledTurn) -> SampledTurn:
        """Record a sampled reply, and return it with its policy version."""
        versioned = replace(turn, policy_version=self._version)
        self._started[request.episode].replies[request.branch, request.turn] = RecordedReply(
            _digest(request), versioned
        )
        return versioned

    def list_episodes(self) -> set[tuple[int, int]]:
        """Return the keys of the episodes that wait for the next round."""
        return {request.episode for request in self.waiting}

    def open_round(self, episodes: Iterable[tuple[int, int]]) -> list[TurnRequest]:
        """Begin the next round of ``episodes``, and return the admitted requests in a fixed order."""
        self._left = dict.fromkeys(episodes, self._turns)
        held, self.waiting = (
            sorted(self.waiting, key=lambda request: (request.episode, request.branch, request.turn)),
            {},
        )
        return [request for request in held if self.admit(request)]

    def shift_start(self, episode: tuple[int, int], started: float) -> float:
        """Store the time that a waiting episode has used since ``started``; return its start without the waiting time.

        In the first round an episode has used no time.
        """
        state = self._started[episode]
        since = [when for request, when in self.waiting.items() if request.episode == episode]
        if self._left and since:
            state.seconds = max(0.0, max(since) - started)
        return time.monotonic() - state.seconds


def _digest(request: TurnRequest) -> str:
    """Digest of the tokens before a reply, of their pictures and of its stop strings."""
    digest = hashlib.sha256(request.token_ids.astype("<i8").tobytes())
    digest.update(repr(request.stop).encode("utf-8", "surrogatepass"))
    digest.update("".join(request.digests).encode())
    return digest.hexdigest()[:32]


def count_carried(groups: Iterable[StartedGroup]) -> tuple[int, int | None]:
    """Return the number of started, unfinished episodes, and the oldest version of the unfinished groups, or None."""
    under_way = [episode for started in groups if started.group is None for episode in started.episodes]
    begun = [episode for episode in under_way if episode.played is None and episode.replies]
    versions = [reply.turn.policy_version for episode in under_way for reply in episode.replies.values()]
    return len(begun), min((version for version in versions if version is not None), default=None)


def measure_dropped(groups: Iterable[RolloutGroup], oldest: int) -> dict[str, float]:
    """Return ``rollout/dropped_stale_share``, the share of sampled tokens of versions before ``oldest``."""
    rows = [row for group in groups for completion in group.completions for row in list_rows(completion)]
    flags = [flag_sampled(row) for row in rows]
    dropped = sum(
        int(row_flags[find_stale_tokens(row, oldest)].sum()) for row, row_flags in zip(rows, flags, strict=True)
    )
    return {"rollout/dropped_stale_share": dropped / max(1, sum(int(row_flags.sum()) for row_flags in flags))}


def encode_started(started: StartedGroup) -> dict[str, Any]:
    """Encode a group as JSON values, without the prompt; :func:`decode_started` is the inverse."""
    return {
        "prompt": started.prompt.index,
        "draw": started.draw,
        "group": None if started.group is None else encode_group(started.group, started.prompt),
        "episodes": [_encode_episode(episode, started.prompt) for episode in started.episodes if started.group is None],
    }


def decode_started(record: Mapping[str, Any], prompt: Prompt, reader: PictureReader | None = None) -> StartedGroup:
    """Decode a group of :func:`encode_started`; for the arguments and errors see :func:`decode_group`."""
    group = None if record["group"] is None else decode_group(record["group"], prompt, reader)
    episodes = [_decode_episode(episode, prompt, reader) for episode in record["episodes"]]
    return StartedGroup(prompt, record["draw"], episodes, group)


def _encode_episode(episode: StartedEpisode, prompt: Prompt) -> dict[str, Any]:
    replies = [
        {"branch": branch, "turn": turn, "context": reply.context, **encode_fields(reply.turn)}
        for (branch, turn), reply in episode.replies.items()
    ]
    played = episode.played and {
        "episode": asdict(episode.played.episode),
        "rows": [encode_fields(row) for row in episode.played.rows],
        "pictures": encode_pictures(
            (picture for row in episode.played.rows for picture in (*row.prompt_pictures, *row.pictures)), prompt
        ),
    }
    return {"replies": replies, "seconds": episode.seconds, "played": played}


def _decode_episode(record: Mapping[str, Any], prompt: Prompt, reader: PictureReader | None) -> StartedEpisode:
    replies = {
        (reply["branch"], reply["turn"]): RecordedReply(reply["context"], decode_fields(SampledTurn, reply))
        for reply in record["replies"]
    }
    played = record["played"]
    if played is None:
        return StartedEpisode(replies, record["seconds"])
    episode = decode_episode(played["episode"])
    assert episode is not None
    pictures = decode_pictures(played.get("pictures", {}), prompt, reader)
    rows = [decode_fields(ChatTokens, row, pictures) for row in played["rows"]]
    return StartedEpisode(replies, record["seconds"], Played(rows, episode))
