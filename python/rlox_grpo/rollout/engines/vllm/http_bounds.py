"""Bounds on connections to a uvicorn server, before a request reaches its application.

uvicorn waits for a request's headers without a limit, and with httptools it keeps headers of any size. A middleware is
called only once the headers are there, so these bounds are in the protocol.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

_TOO_MANY = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nretry-after: 1\r\nconnection: close\r\n\r\n"


@dataclass(frozen=True)
class HttpBounds:
    """What clients may take of a server before they have shown a token.

    Attributes:
        connections: open connections; one more is answered with status 503, which clients try again.
        header_seconds: for sending a request line and its headers, from the connection or the request's first byte on.
        header_bytes: of a request line and its headers.
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
            if self.cycle is not None and not self.cycle.response_complete:  # the headers are there
                self._end_deadline()
                return
            self._start_deadline()
            self._header_bytes += len(data)
            if self._header_bytes > bounds.header_bytes:
                self.transport.close()

        def connection_lost(self, exc: Exception | None) -> None:
            self._end_deadline()
            super().connection_lost(exc)

        def handle_websocket_upgrade(self, *given: Any) -> None:
            self._end_deadline()
            super().handle_websocket_upgrade(*given)

        def _start_deadline(self) -> None:
            if self._deadline is None:
                self._deadline = self.loop.call_later(bounds.header_seconds, self.transport.close)

        def _end_deadline(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
            self._deadline, self._header_bytes = None, 0

    return BoundedProtocol


def bound_uvicorn(bounds: HttpBounds) -> None:
    """Bound the connections of every uvicorn server that this process starts later."""
    auto: Any = importlib.import_module("uvicorn.protocols.http.auto")
    auto.AutoHTTPProtocol = bound_protocol(auto.AutoHTTPProtocol, bounds)
