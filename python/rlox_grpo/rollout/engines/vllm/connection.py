"""A connection to one vLLM server: requests with a deadline and a bearer token, and its last failure."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any

import httpx

from rlox_grpo.distributed.addresses import LOST, find_address
from rlox_grpo.errors import EngineError
from rlox_grpo.rollout.engines.vllm.auth import CANCEL_PATH, NAME_HEADER, WEIGHTS_HEADER, find_token
from rlox_grpo.rollout.engines.weight_sync import Manifest

logger = logging.getLogger(__name__)

MARK = WEIGHTS_HEADER.decode()
"""Response header with the mark of the weights that the server held."""

POLL_SECONDS = 0.5
"""Polling interval of a starting server, in seconds."""

_CONNECT_SECONDS = 5.0
_NAMES = 256
"""Maximum number of requests that one call cancels, because their names are in a header."""

SILENCE_SECONDS = 30
"""Seconds without an answer of the host after which a connection fails. The host's kernel answers for a busy server."""
_PROBES = 3


class Unavailable(Exception):  # noqa: N818  # not an error of the run as long as another server answers
    """A server gave no usable answer: it is down or starting, or has the wrong weights."""


class Outdated(Unavailable):
    """A restarted server needs weights that the trainer has changed since."""


class ServerConnection:
    """A server's address, the connections to it, and its state.

    Attributes:
        named: URL at which the server was started, ``http://host:port``.
        url: current URL, which differs after Ray has moved the server to another node.
        failures: exceptions of requests that another server may answer.
        lock: held by the thread that transfers weights to the server.
        is_up: False while the server is excluded.
        trouble: message of the last failure.
        nccl: the NCCL group for weight transfers, or None.
        rows: number of completions that the server decodes at a time; 0 before it was asked.
    """

    failures = (httpx.TransportError, Unavailable)

    def __init__(self, url: str, max_requests: int) -> None:
        """Prepare to connect; nothing is sent yet.

        Raises:
            ValueError: there is no token for the server.
        """
        self.named = self.url = url.rstrip("/")
        self._max_requests = max_requests
        self._token = find_token(self.url)
        self._client = self._make_client()
        self.lock = Lock()
        self.is_up = True
        self.trouble = ""
        self.nccl: Any = None
        self.rows = 0

    def get(self, path: str, deadline: float) -> Any:
        """Return the answer to a GET; see :meth:`post`."""
        return self._usable(path, self._client.get(path, timeout=self._limits(deadline)))

    def post(self, path: str, deadline: float, **content: Any) -> Any:
        """Return the answer to a POST with httpx's ``json`` and ``headers``, by ``deadline`` on the monotonic clock.

        Raises:
            Unavailable, httpx.TransportError: the server's own failure (:attr:`failures`).
            EngineError: the server refused the request, and other servers would refuse it too.
        """
        return self._usable(path, self._client.post(path, timeout=self._limits(deadline), **content))

    def serves(self, path: str, deadline: float) -> bool:
        """Whether the server reads the body of a POST to ``path``. It gets one that it refuses.

        Raises:
            Unavailable, httpx.TransportError, EngineError: as :meth:`post`, for another refusal.
        """
        answer = self._client.post(path, json={}, timeout=self._limits(deadline))
        if answer.status_code in (403, 404, 405):
            return False
        return answer.status_code in (400, 422) or bool(self._usable(path, answer))

    @contextmanager
    def stream(self, path: str, deadline: float, **content: Any) -> Iterator[Any]:
        """Yield the answer to a POST before its body is read; each part of the body has the same deadline.

        Raises:
            Unavailable, httpx.TransportError, EngineError: as :meth:`post`.
        """
        with self._client.stream("POST", path, timeout=self._limits(deadline), **content) as answer:
            if answer.status_code >= 400:
                answer.read()
            yield self._usable(path, answer)

    def cancel(self, names: Sequence[str], deadline: float) -> None:
        """Cancel running requests by their names; see :data:`.auth.NAME_HEADER`."""
        for start in range(0, len(names), _NAMES):
            self.post(CANCEL_PATH, deadline, headers={NAME_HEADER: ",".join(names[start : start + _NAMES])})

    def held_weights(self, deadline: float) -> str:
        """Return the mark of the weights that the server holds.

        Raises:
            Unavailable, httpx.TransportError: the server or its engine is down. Only ``/health`` shows a dead engine.
        """
        if self.trouble:
            self._follow()
        self.get("/health", deadline)
        return str(self.get("/v1/models", deadline).headers.get(MARK, ""))

    def note(self, error: Exception) -> None:
        """Store why the last request failed."""
        self.trouble = f"{type(error).__name__}: {error}"

    def note_while_waiting(self, seconds: float, error: Exception) -> None:
        """Store why the last request failed; log the first failure of a wait of up to ``seconds``."""
        if not self.trouble:
            logger.warning("waiting up to %g s for %s: %s", seconds, self.url, error)
        self.note(error)

    def report(self) -> str:
        """Return the URL and the last failure."""
        return f"\n{self.url}: {self.trouble or 'left out'}"

    def may_come_back(self, deadline: float) -> bool:
        """Whether there is time to retry before ``deadline``, in case the server is being started."""
        return time.monotonic() + POLL_SECONDS < deadline

    def close(self) -> None:
        """Close the connections; the server runs on."""
        if self.nccl is not None:
            self.nccl.close()
        self._client.close()

    def _make_client(self) -> Any:
        limits = httpx.Limits(max_connections=2 * self._max_requests)
        # The proxy of the environment is not used, because it would see the token.
        return httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {self._token}"},
            transport=httpx.HTTPTransport(limits=limits, trust_env=False, socket_options=list_keepalive_options()),
            trust_env=False,
        )

    def _follow(self) -> None:
        """Connect to the server's new address if Ray has moved it.

        Raises:
            Unavailable: the server's node is gone, and the server has no other node yet.
        """
        now = find_address(self.named)
        if now == LOST:
            raise Unavailable("its node is lost, and Ray has not started it on another one yet")
        if now is not None and now != self.url:
            self.url = now
            self._client = self._make_client()  # the old one stays open: other threads may wait for its answers

    def _limits(self, deadline: float) -> Any:
        left = max(0.1, deadline - time.monotonic())
        return httpx.Timeout(left, connect=min(_CONNECT_SECONDS, left))

    def _usable(self, path: str, answer: Any) -> Any:
        if answer.status_code >= 500:
            raise Unavailable(f"HTTP {answer.status_code}: {answer.text[:500]}")
        if answer.status_code >= 400:
            what = "the token is not its own" if answer.status_code == 401 else answer.text[:500]
            raise EngineError(f"{self.url} refused {path}: HTTP {answer.status_code}: {what}")
        return answer


def list_keepalive_options() -> list[tuple[int, int, int]]:
    """Socket options that make a connection fail :data:`SILENCE_SECONDS` after its peer has become unreachable.

    Without them, a request to an unreachable host would wait until its deadline.
    """
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    pause = SILENCE_SECONDS // (_PROBES + 1)
    values = {"TCP_KEEPIDLE": pause, "TCP_KEEPINTVL": pause, "TCP_KEEPCNT": _PROBES}  # where the system has them
    values["TCP_USER_TIMEOUT"] = SILENCE_SECONDS * 1000  # for data that was not acknowledged
    supported = {name: getattr(socket, name) for name in values if hasattr(socket, name)}
    return [*options, *((socket.IPPROTO_TCP, number, values[name]) for name, number in supported.items())]


def ask_about_model(server: ServerConnection, expected: Manifest, seconds: float) -> tuple[int, int]:
    """Wait up to ``seconds`` for a server to start, and check that it serves the policy's model.

    Returns:
        Maximum number of tokens of a prompt with its completion, and number of completions that the server decodes at
        a time.

    Raises:
        EngineError: there is no answer in time, or the server has another model; the message names some of the weights
            that differ.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            answer = server.post("/collective_rpc", deadline, json={"method": "rlox_manifest"})
            break
        except server.failures as error:
            server.note_while_waiting(seconds, error)
            if not server.may_come_back(deadline):
                raise EngineError(f"no server answers within {seconds:.0f} s{server.report()}") from error
            time.sleep(POLL_SECONDS)
    manifest = {name: tuple(shape) for name, shape in answer.json()["results"][0].items()}
    if manifest != expected:
        differing = sorted(name for name in {*manifest, *expected} if manifest.get(name) != expected.get(name))
        raise EngineError(f"{server.url} serves another model: {', '.join(differing[:4])} differ")
    longest = server.get("/v1/models", deadline).json()["data"][0]["max_model_len"]
    rows = server.post("/collective_rpc", deadline, json={"method": "rlox_rows"}).json()["results"][0]
    return int(longest), int(rows)
