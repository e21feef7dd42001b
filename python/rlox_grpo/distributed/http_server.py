"""An HTTP server with bearer tokens and limits on connections, memory and time.

A request is checked by its headers before its body is read. Connections, bytes in memory and the time to send a request
are limited, so that no client can exhaust the server's threads or memory. Every answer closes its connection.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Generic, TypeVar

logger = logging.getLogger(__name__)

User = TypeVar("User")

_LONGEST_SIZE = 15
"""Maximum number of digits of a Content-Length; a longer number exceeds any limit."""
_TOO_MANY_CONNECTIONS = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
)


@dataclass(frozen=True)
class Bounds:
    """Limits of a server.

    Attributes:
        connections: Maximum number of open connections. A further connection takes the place of one whose request is
            not complete after ``give_way_seconds``; if there is none, it gets status 503, and clients try again.
        header_bytes: Maximum bytes of the request line and all headers.
        body_bytes: Maximum bytes of one request's body.
        memory_bytes: Maximum bytes of the bodies of all requests together; beyond it a request gets status 503.
        header_seconds, body_seconds: Time in which a client must send the headers, and the body.
        answer_seconds: Time for making the answer, and the same again for sending it.
        discard_bytes, discard_seconds: How much of a refused request is still read. Closing a connection with unread
            bytes resets it, and the client may lose the answer.
    """

    connections: int = 128
    give_way_seconds: float = 1.0
    header_bytes: int = 2**15
    body_bytes: int = 2**26
    memory_bytes: int = 2**28
    header_seconds: float = 10.0
    body_seconds: float = 120.0
    answer_seconds: float = 600.0
    discard_bytes: int = 2**16
    discard_seconds: float = 1.0


class _Reservations:
    """Counts the bytes of request bodies in memory."""

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


class _Unsent:
    """The connections whose request is not complete, oldest first."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since: dict[socket.socket, float] = {}
        self._lock = threading.Lock()

    def add(self, connection: socket.socket) -> None:
        with self._lock:
            self._since[connection] = time.monotonic()

    def remove(self, connection: socket.socket) -> None:
        with self._lock:
            self._since.pop(connection, None)

    def end_oldest(self) -> bool:
        """End the oldest connection; False if there is none, or it is younger than ``seconds``."""
        with self._lock:
            oldest, since = next(iter(self._since.items()), (None, 0.0))
            if oldest is None or time.monotonic() - since < self._seconds:
                return False
            del self._since[oldest]
            with contextlib.suppress(OSError):  # the client has gone
                oldest.shutdown(socket.SHUT_RDWR)  # its thread reads the end
            return True


class _BoundedReader(io.RawIOBase):
    """Reads at most a number of bytes from a socket, until a deadline.

    Raises TimeoutError past the deadline, ConnectionError past the bytes.
    """

    def __init__(self, connection: socket.socket, limit: int, seconds: float) -> None:
        self._connection = connection
        self.allow(limit, seconds)

    def allow(self, limit: int, seconds: float) -> None:
        """Set the limits of the next reads."""
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


@dataclass(frozen=True)
class Answer:
    """An answer to a request.

    Attributes:
        status: HTTP status; an answer with 400 or more is a refusal and has a body of bytes.
        body: the complete body, or a generator of parts, which is closed at the end and if the client disconnects.
        kind: media type.
    """

    status: int
    body: bytes | Generator[bytes, None, None]
    kind: str = "application/json"


@dataclass(frozen=True)
class Service(Generic[User]):
    """The handlers of a server.

    Attributes:
        authorize: returns the user of an ``Authorization`` header; None is answered with status 401.
        get: answers a GET of a path; None is answered with status 404.
        post: answers a POST of a path and a body, in its own thread. The last argument of ``post`` is a function that
            returns whether the client has disconnected.
        posts: the paths of ``post``.
        describe_error: takes the status and the reason of a refusal, and returns its body.
    """

    authorize: Callable[[str], User | None]
    get: Callable[[User, str], Answer | None]
    post: Callable[[User, str, bytes, Callable[[], bool]], Answer]
    posts: frozenset[str]
    describe_error: Callable[[int, str], bytes] = lambda status, why: json.dumps({"error": why}).encode()


def make_bounded_server(
    service: Service[User], *, host: str = "127.0.0.1", port: int = 0, bounds: Bounds
) -> ThreadingHTTPServer:
    """Create an HTTP server on ``host:port`` (0: a free port); ``serve_forever()`` starts it."""
    return _Server((host, port), service, bounds)


class _Server(ThreadingHTTPServer):
    """Accepts connections within the bounds, each in a thread of its own.

    Attributes:
        service, bounds: the handlers and the limits.
        memory: the bytes of the bodies of all requests.
        unsent: the connections whose request is not complete.
    """

    daemon_threads = True

    def __init__(self, address: tuple[str, int], service: Service[Any], bounds: Bounds) -> None:
        self.service, self.bounds = service, bounds
        self.memory, self.unsent = _Reservations(bounds.memory_bytes), _Unsent(bounds.give_way_seconds)
        self._open_connections = threading.Semaphore(bounds.connections)
        self.request_queue_size = bounds.connections  # the system resets what waits beyond it; the default is 5
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        is_taken = self._open_connections.acquire(blocking=False)
        if is_taken or (
            self.unsent.end_oldest() and self._open_connections.acquire(timeout=self.bounds.discard_seconds)
        ):
            self.unsent.add(request)
            try:
                super().process_request(request, client_address)
            except BaseException:  # the system refuses a thread
                self.unsent.remove(request)
                self._open_connections.release()
                raise
            return
        request.settimeout(self.bounds.discard_seconds)
        try:
            request.sendall(_TOO_MANY_CONNECTIONS)
        except OSError:
            logger.debug("a connection too many was gone")
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.unsent.remove(request)
            self._open_connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a connection of %s failed", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    """Reads one request within the bounds, and sends the answer of the service."""

    server: _Server
    server_version, sys_version = "rlox-grpo", ""
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self._bounds, self._service = self.server.bounds, self.server.service
        self._raw = _BoundedReader(self.connection, self._bounds.header_bytes, self._bounds.header_seconds)
        self.rfile = io.BufferedReader(self._raw)

    def handle_expect_100(self) -> bool:
        """Ask for the body only of a client that has a token."""
        if self._find_user() is None:
            self._answer(self._refuse_user())
            return False
        return super().handle_expect_100()

    def do_GET(self) -> None:
        self.server.unsent.remove(self.connection)
        user = self._find_user()
        self._answer(self._refuse_user() if user is None else self._service.get(user, self.path) or self._refuse_path())

    def do_POST(self) -> None:
        user = self._find_user()
        self._answer(self._refuse_user() if user is None else self._post(user))

    def _refuse(self, status: int, why: str) -> Answer:
        return Answer(status, self._service.describe_error(status, why))

    def _refuse_user(self) -> Answer:
        return self._refuse(401, "the token is missing or another one")

    def _find_user(self) -> Any:
        return self._service.authorize(self.headers.get("Authorization", ""))

    def _refuse_path(self) -> Answer:
        return self._refuse(404, f"there is no {self.path[:80]!r}")

    def _post(self, user: Any) -> Answer:
        if self.path not in self._service.posts:
            return self._refuse_path()
        size = self.headers.get("Content-Length", "")
        if not (size.isascii() and size.isdigit()):
            return self._refuse(411, "Content-Length is missing")
        if len(size) > _LONGEST_SIZE or int(size) > self._bounds.body_bytes:
            return self._refuse(413, f"{size[:_LONGEST_SIZE]} bytes: one request may have {self._bounds.body_bytes}")
        count = int(size)
        if not self.server.memory.take(count):
            return self._refuse(503, "other requests fill the memory for requests")
        try:
            return self._read_and_post(user, count)
        finally:
            self.server.memory.give_back(count)

    def _read_and_post(self, user: Any, count: int) -> Answer:
        self._raw.allow(count, self._bounds.body_seconds)
        try:
            body = self.rfile.read(count)
        except TimeoutError:
            return self._refuse(408, "the request was not sent in time")
        if len(body) < count:
            return self._refuse(400, f"the body has {len(body)} of its {count} bytes")
        self.server.unsent.remove(self.connection)
        return self._service.post(user, self.path, body, self._is_gone)

    def _is_gone(self) -> bool:
        self.connection.settimeout(0.0)
        try:
            return not self.connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _answer(self, answer: Answer) -> None:
        self.close_connection = True
        self.connection.settimeout(self._bounds.answer_seconds)
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.kind)
        self.send_header("Connection", "close")
        if isinstance(answer.body, bytes):
            self.send_header("Content-Length", str(len(answer.body)))
            self.end_headers()
            self.wfile.write(answer.body)
            if answer.status >= 400:
                self._discard_rest()
            return
        with contextlib.closing(answer.body) as chunks:
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for chunk in chunks:
                self.wfile.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
            self.wfile.write(b"0\r\n\r\n")

    def _discard_rest(self) -> None:
        self._raw.allow(self._bounds.discard_bytes, self._bounds.discard_seconds)
        with contextlib.suppress(OSError):  # the client is gone, or goes on sending
            self.connection.shutdown(socket.SHUT_WR)
            while self._raw.read(2**12):
                pass

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)
