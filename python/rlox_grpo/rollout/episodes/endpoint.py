"""OpenAI-compatible endpoints of episodes: one HTTP server on loopback, and a key for each episode.

The server (:mod:`rlox_grpo.distributed.http_server`) refuses a request without a valid key before it reads the body,
and limits connections, bytes and time. A key is valid until its episode ends.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from typing import Any

from rlox_grpo.distributed.http_server import Answer, Bounds, Service, make_bounded_server
from rlox_grpo.environments import EpisodeEnded, Reply
from rlox_grpo.errors import ConfigError
from rlox_grpo.rollout.episodes.blocking import EnvironmentTime, LoopBlockedError
from rlox_grpo.rollout.episodes.chat import Chat
from rlox_grpo.rollout.episodes.openai_format import (
    ChatAnswer,
    OpenAIRequest,
    RequestError,
    TextAnswer,
    list_models,
    make_error,
    make_error_event,
    read_chat_request,
    read_completion_request,
)
from rlox_grpo.rollout.episodes.streaming import Delta
from rlox_grpo.types import Sampling

logger = logging.getLogger(__name__)

CALLS_AFTER_END = 8
"""Number of calls that are answered with an error after a limit has ended the episode. The next call cancels the
episode's task, because the agent ignores the error and may call forever."""

_LOOK_AT_CLIENT = 0.2
"""Seconds between two checks whether the client of a call has disconnected."""

_MODELS = "/v1/models"
_POSTS: Mapping[str, tuple[Callable[[bytes, Sampling], OpenAIRequest], type[ChatAnswer | TextAnswer]]] = {
    "/v1/chat/completions": (read_chat_request, ChatAnswer),
    "/v1/completions": (read_completion_request, TextAnswer),
}
"""The readers of the requests to each path, and the writers of the answers."""


@dataclass(eq=False)
class _Open:
    """The endpoint of one episode."""

    chat: Chat
    waiting: set[Future[Any]] = field(default_factory=set)
    late_calls: int = 0


class Endpoints:
    """The endpoints of one batch of episodes. The server starts when the first endpoint is opened."""

    def __init__(self, sampling: Sampling, max_episodes: int, environment_time: EnvironmentTime) -> None:
        """Prepare, in the event loop of the episodes; nothing listens yet.

        Args:
            sampling: the run's parameters; a request with another temperature or top_p is refused.
            max_episodes: number of episodes; each may have several connections at a time.
            environment_time: tells a call that waits for a blocked event loop from one that waits for its reply.
        """
        self._sampling, self._environment_time = sampling, environment_time
        self._loop = asyncio.get_running_loop()
        # The times are generous, because a reply can wait for other replies, vLLM compiles in its first steps, and an
        # agent in this process sends its request from the event loop that the engine's steps block.
        self._bounds = Bounds(
            connections=min(4096, 64 + 8 * max_episodes),
            body_bytes=2**24,
            header_seconds=600.0,
            body_seconds=600.0,
            answer_seconds=3600.0,
        )
        self._server: ThreadingHTTPServer | None = None
        self._open: dict[str, _Open] = {}
        self._keys: dict[Chat, str] = {}
        self._ended: set[Chat] = set()
        self._lock = threading.Lock()

    def open(self, chat: Chat) -> tuple[str, str]:
        """Return the URL and the key of an episode, the same at every call.

        Raises:
            ValueError: the episode has ended.
        """
        with self._lock:
            if chat in self._ended:
                raise ValueError("the episode has ended, and its endpoint with it")
            if self._server is None:
                self._server = self._start()
            key = self._keys.get(chat)
            if key is None:
                key = self._keys[chat] = f"rlox-{secrets.token_urlsafe(32)}"
                self._open[_hash(key)] = _Open(chat)
            return f"http://127.0.0.1:{self._server.server_address[1]}/v1", key

    def end_episode(self, chat: Chat) -> None:
        """Invalidate an episode's key, and cancel its pending calls."""
        with self._lock:
            self._ended.add(chat)
            key = self._keys.pop(chat, None)
            waiting = [] if key is None else list(self._open.pop(_hash(key)).waiting)
        for future in waiting:
            future.cancel()

    def close(self) -> None:
        """End all episodes, and stop the server."""
        for chat in list(self._keys):
            self.end_episode(chat)
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def _start(self) -> ThreadingHTTPServer:
        service = Service(
            self._authorize,
            lambda _, path: Answer(200, list_models()) if path == _MODELS else None,
            self._post,
            frozenset(_POSTS),
            _describe_error,
        )
        server = make_bounded_server(service, bounds=self._bounds)
        server.block_on_close = False  # do not wait for requests of agents that still run
        threading.Thread(
            target=server.serve_forever, args=(0.05,), name="rlox_grpo episode endpoints", daemon=True
        ).start()
        return server

    def _authorize(self, header: str) -> _Open | None:
        scheme, _, key = header.partition(" ")
        # Keys are looked up by digest, so that the time of the look-up reveals nothing about a key.
        return self._open.get(_hash(key)) if scheme == "Bearer" else None

    def _post(self, episode: _Open, path: str, body: bytes, is_gone: Callable[[], bool]) -> Answer:
        """Answer a call, with a stream of events if it asks for one. An error before the first event sets the status.

        From the first event on, the reply is sampled to its end even if its client disconnects, so that the trained
        tokens do not depend on when the disconnection is noticed.
        """
        read, make_writer = _POSTS[path]
        deadline = time.monotonic() + self._bounds.answer_seconds
        deltas: queue.SimpleQueue[Delta | None] = queue.SimpleQueue()
        try:
            request = read(body, self._sampling)
            future = self._submit(episode, _complete(episode.chat, request, deltas.put if request.stream else None))
            future.add_done_callback(lambda _: deltas.put(None))
            first = self._wait_for_delta(deltas, future, is_gone, deadline)
            if first is None:
                future.result()  # raises where the call failed
        except BaseException as error:  # noqa: BLE001  a cancelled future's too
            return Answer(400, self._describe(error, episode))
        writer = make_writer(request)
        if not request.stream:
            return Answer(200, writer.make_body(future.result()))

        def make_events() -> Generator[bytes, None, None]:
            delta = first
            try:
                while delta is not None:
                    yield writer.make_event(delta)
                    delta = deltas.get(timeout=max(0.0, deadline - time.monotonic()))
                last = writer.make_last_events(future.result())
            except GeneratorExit:
                raise
            except BaseException as error:  # noqa: BLE001  a cancelled future's too
                future.cancel()
                last = make_error_event(self._describe(error, episode))
            yield last

        return Answer(200, make_events(), "text/event-stream")

    def _describe(self, error: BaseException, episode: _Open) -> bytes:
        """Return the error of a call in the form of OpenAI's API."""
        if isinstance(error, RequestError):
            return make_error(str(error), param=error.param)
        if isinstance(error, EpisodeEnded):
            episode.chat.has_reported_end = True
            message = f"the episode has ended by {error.reason}: end the agent, or return its reward"
            return make_error(message, "episode_ended", code=error.reason)
        if isinstance(error, (CancelledError, asyncio.CancelledError)):
            return make_error("the episode has ended", "episode_ended", code="ended")
        if isinstance(error, queue.Empty):
            return make_error(f"there was no reply within {self._bounds.answer_seconds:g} s")
        # A ValueError may be a TemplateError: messages that cannot be rendered.
        if isinstance(error, (ValueError, ConfigError, LoopBlockedError)):
            return make_error(str(error))
        logger.warning("an episode's endpoint failed", exc_info=error)
        return make_error(f"{type(error).__name__}: {error}"[:2000], "server_error")

    def _submit(self, episode: _Open, coroutine: Coroutine[Any, Any, Reply]) -> Future[Reply]:
        """Run a call in the episode's event loop.

        Raises:
            CancelledError: the episode has ended.
        """
        with self._lock:
            if episode.chat in self._ended:
                coroutine.close()
                raise CancelledError
            if episode.chat.ended is not None:
                episode.late_calls += 1
                if episode.late_calls > CALLS_AFTER_END:
                    episode.chat.abandoned = True
            try:
                future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
            except RuntimeError:  # the loop has ended
                coroutine.close()
                raise CancelledError from None
            episode.waiting.add(future)
        future.add_done_callback(episode.waiting.discard)  # atomic
        return future

    def _wait_for_delta(
        self,
        deltas: queue.SimpleQueue[Delta | None],
        future: Future[Any],
        is_gone: Callable[[], bool],
        deadline: float,
    ) -> Delta | None:
        """Wait for the first piece of a reply, or for the end of the call, for which None is returned.

        Raises:
            queue.Empty: the client disconnected, or the deadline passed; the call is cancelled.
            LoopBlockedError: an environment blocks the event loop; the call is cancelled.
        """
        try:
            while True:
                with suppress(queue.Empty):
                    return deltas.get(timeout=min(_LOOK_AT_CLIENT, max(0.0, deadline - time.monotonic())))
                if time.monotonic() >= deadline or is_gone():
                    raise queue.Empty
                self._environment_time.refuse_blocked()
        except (queue.Empty, LoopBlockedError):
            future.cancel()
            raise


async def _complete(chat: Chat, request: OpenAIRequest, on_delta: Callable[[Delta], None] | None) -> Reply:
    options: dict[str, Any] = {"max_new_tokens": request.max_new_tokens, "stop": request.stop, "on_delta": on_delta}
    if request.token_ids is not None:
        return await chat.complete_ids(request.token_ids, **options)
    return await chat.complete(request.messages, tools=request.tools, **options)


def _describe_error(status: int, why: str) -> bytes:
    kind = "authentication_error" if status == 401 else "invalid_request_error"
    message = "the key is missing, or its episode has ended: use chat.api_key" if status == 401 else why
    return make_error(message, kind, code="invalid_api_key" if status == 401 else None)


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()
