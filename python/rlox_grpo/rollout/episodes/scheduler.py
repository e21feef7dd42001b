"""The scheduler of episodes: start them, decode their pending replies together, and cancel late ones."""

from __future__ import annotations

import asyncio
import functools
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from rlox_grpo.config.records.episodes import EpisodeConfig
from rlox_grpo.rollout.engines.turns import SampledTurn, TurnRequest, TurnSession
from rlox_grpo.rollout.episodes.blocking import EnvironmentTime
from rlox_grpo.rollout.episodes.chat import Chat
from rlox_grpo.rollout.episodes.partial import Gate
from rlox_grpo.types import Episode, Prompt

SETTLE_ROUNDS = 32
"""Iterations of the event loop after which an environment that waits for nothing has sent its next request."""

TICK = 0.05
"""Seconds between two checks of the deadlines while nothing is decoded."""


@dataclass(eq=False)
class Running:
    """One running episode.

    Attributes:
        prompt, chat: the prompt and the chat of the episode.
        key: index of the prompt in its step, and of the completion in its group.
        end_endpoint: closes the episode's endpoint.
        limits: the limits of concurrent episodes that it counts in, as name and number.
        task: the task that runs it; None before it starts.
        is_cancelled: whether this module has cancelled the task. If not, a CancelledError comes from the environment.
        started: ``time.monotonic()`` of its start; None while it waits for a worker process.
        episode: the outcome of the episode; None until it has finished.
    """

    prompt: Prompt
    key: tuple[int, int]
    chat: Chat
    end_endpoint: Callable[[], None]
    limits: Sequence[tuple[str, int]] = ()
    task: asyncio.Task[Episode] | None = None
    is_cancelled: bool = False
    started: float | None = None
    episode: Episode | None = None

    @property
    def is_done(self) -> bool:
        """Whether the episode was started and has finished."""
        return self.task is not None and self.task.done()

    def cancel(self) -> None:
        """Cancel the task, if it has been started."""
        if self.task is not None:
            self.is_cancelled = True
            self.task.cancel()


class Replies:
    """The pending requests for replies. With a ``gate``, some requests wait for the next round of their episode.

    ``check`` is called with each request and its reply, and raises EngineError for a reply that cannot be trained on.
    """

    def __init__(
        self,
        session: TurnSession,
        gate: Gate | None = None,
        check: Callable[[TurnRequest, SampledTurn], None] | None = None,
    ) -> None:
        self.session, self.gate, self._check = session, gate, check
        self.environment_time = EnvironmentTime()
        self.changed = asyncio.Event()
        """Set when a request arrives or an episode finishes."""
        self.futures: dict[TurnRequest, asyncio.Future[SampledTurn]] = {}

    async def sample(self, request: TurnRequest) -> SampledTurn:
        """Submit a request and wait for its reply; return a recorded reply at once."""
        if self.gate is not None and (recorded := self.gate.find(request)) is not None:
            return recorded
        if self.gate is None or self.gate.admit(request):
            self.session.submit(request)
        future: asyncio.Future[SampledTurn] = asyncio.get_running_loop().create_future()
        self.futures[request] = future
        self.changed.set()
        try:
            return await future
        finally:
            is_held = self.gate is not None and self.gate.waiting.pop(request, None) is not None
            if self.futures.pop(request, None) is not None and not is_held:  # cancelled before its reply
                self.session.drop(request)

    def step(self) -> None:
        """Decode one step, and return complete replies to their episodes."""
        for request, turn in self.session.step():
            if self._check is not None:
                self._check(request, turn)
            future = self.futures.pop(request, None)
            if future is not None and not future.done():
                future.set_result(turn if self.gate is None else self.gate.record(request, turn))

    def forget(self, key: tuple[int, int]) -> None:
        """Cancel the pending requests of a finished episode."""
        self.session.forget(key)
        for request in [request for request in self.futures if request.episode == key]:
            self.futures.pop(request).cancel()
            if self.gate is not None:
                self.gate.waiting.pop(request, None)

    def open_round(self, keys: Iterable[tuple[int, int]]) -> None:
        """Submit the requests that waited for the next round, of the episodes with these ``keys``."""
        assert self.gate is not None
        for request in self.gate.open_round(keys):
            try:
                self.session.submit(request)
            except ValueError as error:  # raised in the episode, as without a gate
                self.futures.pop(request).set_exception(error)


async def run_episodes(
    running: Sequence[Running],
    replies: Replies,
    play: Callable[[Running], Awaitable[Episode]],
    config: EpisodeConfig,
    *,
    max_live: int | None,
    on_ended: Callable[[int, int], None] | None,
    must_stop: Callable[[], bool] | None = None,
) -> None:
    """Run every episode to its end, at most ``max_live`` at a time and within the limits of each.

    The first exception cancels all episodes. With a gate, episodes run in rounds. ``must_stop()`` is called after each
    round; True cancels unfinished episodes.

    Args:
        running: the episodes, in the order in which they start.
        replies: the pending requests of the episodes.
        play: runs one episode.
        config: options of the episodes; only the timeouts are used.
        max_live: maximum number of concurrent episodes; None: all.
        on_ended: called with the numbers of finished and of all episodes.
        must_stop: see above.
    """
    gate = replies.gate
    waiting = deque(running)
    live: dict[tuple[int, int], Running] = {}

    def find_next() -> Running | None:
        """Return the first waiting episode that may start now."""
        if len(live) >= (max_live or len(running)):
            return None
        return _find_startable(waiting, live.values())

    try:
        while waiting or live:
            while (episode := find_next()) is not None:
                waiting.remove(episode)
                live[episode.key] = episode
                episode.chat.resume()
                episode.task = asyncio.ensure_future(play(episode))
                episode.task.add_done_callback(functools.partial(_note_end, episode, replies.changed))
            await _settle(live, replies)
            ended = [episode for episode in live.values() if episode.is_done]
            for episode in ended:
                assert episode.task is not None
                episode.episode = episode.task.result()
                replies.forget(episode.key)
                del live[episode.key]
            if ended and on_ended is not None:
                on_ended(len(running) - len(waiting) - len(live), len(running))
            held = set() if gate is None else gate.list_episodes()
            _cancel_late([episode for episode in live.values() if episode.key not in held], config)
            if len(replies.session):
                replies.step()
            # The round is over if every live episode waits at the gate.
            elif gate is not None and live and held >= live.keys() and find_next() is None:
                for episode in live.values():
                    if episode.started is not None:
                        episode.started = gate.shift_start(episode.key, episode.started)
                if must_stop is not None and must_stop():
                    for episode in live.values():
                        episode.chat.ended = "suspended"  # an environment that catches the cancellation cannot go on
                    return
                replies.open_round(live)
            elif live:
                replies.changed.clear()
                if any(episode.is_done for episode in live.values()) or len(replies.session):
                    continue
                # There is no reply to sample, and no episode has ended. Wait for a change, and check the deadlines
                # every TICK.
                try:
                    with replies.environment_time.measure():
                        await asyncio.wait_for(replies.changed.wait(), TICK)
                except (asyncio.TimeoutError, TimeoutError):
                    continue
    finally:
        for episode in running:
            episode.cancel()
        tasks = [episode.task for episode in running if episode.task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)


def _note_end(episode: Running, changed: asyncio.Event, _: object) -> None:
    episode.end_endpoint()
    episode.chat.ended = episode.chat.ended or "completed"  # a task that the environment left behind gets no reply
    changed.set()


def _find_startable(waiting: Collection[Running], live: Iterable[Running]) -> Running | None:
    """Return the first waiting episode none of whose limits is reached by the live episodes."""
    if not any(episode.limits for episode in waiting):
        return next(iter(waiting), None)
    counts = Counter(name for episode in live for name, _ in episode.limits)
    return next((episode for episode in waiting if all(counts[name] < most for name, most in episode.limits)), None)


async def _settle(live: dict[tuple[int, int], Running], replies: Replies) -> None:
    """Run the event loop until every environment waits for the policy or for something else."""
    for _ in range(SETTLE_ROUNDS):
        with replies.environment_time.measure():
            await asyncio.sleep(0)
        waiting = {request.episode for request in replies.futures}
        if len(live) <= len(waiting) + sum(episode.is_done for episode in live.values()):
            return


def _cancel_late(live: Sequence[Running], config: EpisodeConfig) -> None:
    """Cancel environments past their deadline, at every call until they end."""
    for episode in live:
        if episode.chat.abandoned:
            episode.cancel()
    if config.turn_timeout is None and config.episode_timeout is None:
        return
    now = time.monotonic()
    for episode in live:
        since = episode.chat.waiting_since
        if episode.started is None and (since is not None or episode.chat.prompt_messages):
            episode.started = now
        late = (
            (since, config.turn_timeout),
            (episode.chat.calling_since, config.turn_timeout),
            (episode.started, config.episode_timeout),
        )
        if episode.task is not None and any(
            start is not None and timeout is not None and now - start > timeout for start, timeout in late
        ):
            episode.chat.ended = "timeout"
            episode.cancel()


T = TypeVar("T")


def run_coroutine(make: Callable[[], Awaitable[T]]) -> T:
    """Await ``make()`` on a new event loop, in another thread if this thread has a running loop, as in a notebook."""

    async def main() -> T:
        return await make()

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(main())
    thread = ThreadPoolExecutor(1, "rlox_grpo episodes")
    try:
        return thread.submit(lambda: asyncio.run(main())).result()
    finally:
        thread.shutdown(wait=False)  # Ctrl-C does not wait for the episodes
