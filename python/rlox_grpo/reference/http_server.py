"""The HTTP side of ``rlox-grpo serve-reference``: who may ask, how much, how often, and for how long.

A request is refused by its headers before its body is read. Connections, bytes in memory and the time for sending a
request are bounded, so that no client can hold the server's threads or memory. Every answer ends its connection.
"""

from __future__ import annotations

import hmac
import io
import json
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from safetensors.torch import save
from torch import Tensor

from rlox_grpo.reference.client import Question, unpack_question

logger = logging.getLogger(__name__)

_LONGEST_SIZE = 15
"""Digits of a Content-Length; more are beyond any bound."""
_TOO_MANY_CONNECTIONS = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
)


@dataclass(frozen=True)
class Bounds:
    """What clients may take of the server.

    Attributes:
        connections: Open connections; one more is answered with status 503, which clients try again.
        header_bytes: Of the request line and all headers.
        body_bytes: Of one request's body.
        memory_bytes: Of the bodies of all requests together; status 503 beyond.
        header_seconds, body_seconds: For sending the headers, and the body.
        answer_seconds: For measuring, and for taking the answer.
        discard_bytes, discard_seconds: Read and thrown away after a refusal: closing a connection with unread bytes
            resets it, and the client may lose the answer.
    """

    connections: int = 128
    header_bytes: int = 2**15
    body_bytes: int = 2**26
    memory_bytes: int = 2**28
    header_seconds: float = 10.0
    body_seconds: float = 120.0
    answer_seconds: float = 600.0
    discard_bytes: int = 2**16
    discard_seconds: float = 1.0


class _Reservations:
    """Bytes that requests hold."""

    def __init__(self, limit: int) -> None:
        self._left = limit
        self._lock = threading.Lock()

    def take(self, count: int) -> bool:
        with self._lock:
            enough = count <= self._left
            self._left -= count if enough else 0
            return enough

    def give_back(self, count: int) -> None:
        with self._lock:
            self._left += count


class _BoundedReader(io.RawIOBase):
    """Reads a socket until a deadline, and no more than a number of bytes.

    Raises TimeoutError past the deadline, ConnectionError past the bytes.
    """

    def __init__(self, connection: socket.socket, limit: int, seconds: float) -> None:
        self._connection = connection
        self.allow(limit, seconds)

    def allow(self, limit: int, seconds: float) -> None:
        """The bounds of what is read from here on."""
        self._left, self._deadline = limit, time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: self._left]
        if not len(view):
            raise ConnectionError("the request is longer than it may be")
        seconds = self._deadline - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("the request was not sent in time")
        self._connection.settimeout(seconds)
        count = self._connection.recv_into(view)
        self._left -= count
        return count


def make_server(
    submit: Callable[[Question], Future[Tensor]],
    about: Mapping[str, object],
    token: str,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    bounds: Bounds | None = None,
) -> ThreadingHTTPServer:
    """Create an HTTP server on ``host:port`` (0: a free port); ``serve_forever()`` starts it.

    ``GET /health`` answers ``about``, ``POST /log_probs`` takes a :class:`Question` and answers what ``submit`` gives.

    Args:
        submit: Queues a question. Raises ValueError for one that the model cannot answer, queue.Full where too many
            wait.
    """
    limits = bounds or Bounds()
    memory = _Reservations(limits.memory_bytes)
    open_connections = threading.Semaphore(limits.connections)

    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version = "rlox-grpo", ""
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            self._raw = _BoundedReader(self.connection, limits.header_bytes, limits.header_seconds)
            self.rfile = io.BufferedReader(self._raw)

        def do_GET(self) -> None:
            if not self._is_allowed("/health"):
                return
            self._answer(200, json.dumps(about).encode(), "application/json")

        def do_POST(self) -> None:
            if not self._is_allowed("/log_probs"):
                return
            size = self.headers.get("Content-Length", "")
            if not (size.isascii() and size.isdigit()):
                return self._refuse(411, "Content-Length is missing")
            if len(size) > _LONGEST_SIZE or int(size) > limits.body_bytes:
                return self._refuse(413, f"{size[:_LONGEST_SIZE]} bytes: one request may have {limits.body_bytes}")
            count = int(size)
            if not memory.take(count):
                return self._refuse(503, "other requests fill the memory for requests")
            try:
                self._measure(count)
            finally:
                memory.give_back(count)

        def _measure(self, count: int) -> None:
            answer: Future[Tensor] | None = None
            self._raw.allow(count, limits.body_seconds)
            try:
                body = self.rfile.read(count)
                if len(body) < count:
                    return self._refuse(400, f"the body has {len(body)} of its {count} bytes")
                answer = submit(unpack_question(body))
                log_probs = answer.result(limits.answer_seconds)
            except ValueError as error:
                return self._refuse(400, str(error))
            except queue.Full:
                return self._refuse(503, "too many requests wait already")
            except (FutureTimeoutError, CancelledError):
                if answer is None:
                    return self._refuse(408, "the request was not sent in time")
                answer.cancel()
                return self._refuse(503, f"there was no answer within {limits.answer_seconds:g} s")
            except RuntimeError as error:
                return self._refuse(500, str(error))
            self._answer(200, save({"log_probs": log_probs}), "application/octet-stream")

        def _is_allowed(self, path: str) -> bool:
            given = self.headers.get("Authorization", "")
            if not hmac.compare_digest(given.encode("utf-8", "replace"), f"Bearer {token}".encode()):
                self._refuse(401, "the token is missing or another one")
            elif self.path != path:
                self._refuse(404, f"there is no {self.path[:80]!r}")
            else:
                return True
            return False

        def _refuse(self, status: int, why: str) -> None:
            self._answer(status, json.dumps({"error": why}).encode(), "application/json")
            self._raw.allow(limits.discard_bytes, limits.discard_seconds)
            try:
                self.connection.shutdown(socket.SHUT_WR)
                while self._raw.read(2**12):
                    pass
            except OSError:  # the client is gone, or goes on sending
                return

        def _answer(self, status: int, body: bytes, kind: str) -> None:
            self.close_connection = True
            self.connection.settimeout(limits.answer_seconds)
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            logger.debug(format, *args)

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def process_request(self, request: Any, client_address: Any) -> None:
            if open_connections.acquire(blocking=False):
                super().process_request(request, client_address)
                return
            request.settimeout(limits.discard_seconds)
            try:
                request.sendall(_TOO_MANY_CONNECTIONS)
            except OSError:
                logger.debug("a connection too many was gone")
            self.shutdown_request(request)

        def process_request_thread(self, request: Any, client_address: Any) -> None:
            try:
                super().process_request_thread(request, client_address)
            finally:
                open_connections.release()

        def handle_error(self, request: Any, client_address: Any) -> None:
            logger.debug("a connection of %s failed", client_address, exc_info=True)

    return Server((host, port), Handler)
