"""Bounds on connections to a uvicorn server, before a request reaches its application.

uvicorn waits for a request's headers without a time limit, and with httptools it accepts headers of any size. A
middleware is called only when all headers have arrived, so the bounds are set in the protocol class.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

_TOO_MANY = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nretry-after: 1\r\nconnection: close\r\n\r\n"


@dataclass(frozen=True)
class HttpBounds:
    """Limits on clients that have not sent a valid token.

    Attributes:
        connections: maximum number of open connections. A further connection gets status 503, after which clients
            retry.
        header_seconds: maximum time to receive a request line and its headers, counted from the connection or from the
            first byte.
        header_bytes: maximum size of a request line and its headers.
    """

    connections: int = 2048
    header_seconds: float = 10.0
    header_bytes: int = 2**16


def bound_protocol(base: Any, bounds: HttpBounds) -> Any:
    """Return uvicorn's HTTP protocol class ``base`` with ``bounds``."""

    class BoundedProtocol(base):  # type: ignore[misc]
        _deadline: Any = None
        _header_bytes = 0

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > bounds.connections:
                transport.write(_TOO_MANY)
                transport.close()
                return
            self._start_deadline()

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing():
                return
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:  # all headers have arrived
                self._end_deadline()
                return
            self._start_deadline()
            self._header_bytes += len(data)
            if self._header_bytes > bounds.header_bytes:
                self.transport.close()

        def connection_lost(self, exc: Exception | None) -> None:
            self._end_deadline()
            super().connection_lost(exc)

        def handle_websocket_upgrade(self, *arguments: Any) -> None:
            self._end_deadline()
            super().handle_websocket_upgrade(*arguments)

        def _start_deadline(self) -> None:
            if self._deadline is None:
                self._deadline = self.loop.call_later(bounds.header_seconds, self.transport.close)

        def _end_deadline(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
            self._deadline, self._header_bytes = None, 0

    return BoundedProtocol


def bound_uvicorn(bounds: HttpBounds) -> None:
    """Apply ``bounds`` to every uvicorn server that this process starts later."""
    auto: Any = importlib.import_module("uvicorn.protocols.http.auto")
    auto.AutoHTTPProtocol = bound_protocol(auto.AutoHTTPProtocol, bounds)
