"""ASGI middleware of ``rlox-grpo serve``: a bearer token, limits, and a header with the mark of the weights.

vLLM's ``--api-key`` protects ``/v1`` and a few other prefixes, but not the paths that reload weights, run methods in
the workers or pause the server. Here every path except ``/health`` needs the token.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

TOKEN_VARIABLE = "RLOX_GRPO_SERVER_TOKEN"
WEIGHTS_HEADER = b"x-rlox-weights"
LOADING = "loading"
END_MARK = ": x-rlox-weights "
"""Prefix of the line after a stream's last event, which has the mark of the weights."""

NAME_HEADER = "x-rlox-request"
"""Request header with a name, by which the request can be cancelled."""
CANCEL_PATH = "/rlox/cancel"
"""A POST with names in :data:`NAME_HEADER`, separated by commas, cancels those requests."""
CANCELLED = 499
"""Status of a request that was cancelled."""

MOST_REQUESTS = 1024
"""Maximum number of concurrent requests. A further request gets status 503, after which clients retry."""
MOST_BODY_BYTES = 2**25
BODY_SECONDS = 60.0
"""Time to send the body of a request."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def find_token(url: str) -> str:
    """Read the token of the server at ``url`` from the environment.

    Raises:
        ValueError: there is none.
    """
    token = os.environ.get(TOKEN_VARIABLE)
    if not token:
        raise ValueError(f"no token for the server at {url}: set {TOKEN_VARIABLE}, here and where it is started")
    return token


class TokenGuard:
    """Refuses requests without the token, and adds the mark of the server's weights to every answer.

    The mark is the value of the header ``x-rlox-weights`` in requests that change weights. ``loading`` takes effect
    when the request arrives; any other value takes effect when it has succeeded. An answer has the mark that was
    valid when its request arrived, or ``loading`` if the mark has changed since then. After a restart the mark is
    ``none``. A client therefore notices answers from weights that it did not send. The headers of a stream of events
    are sent before its tokens are sampled, so the mark is repeated in a comment after the last event.

    A cancelled request looks to the application like a disconnected client, so vLLM stops sampling.
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app
        self._token = os.environ.get(TOKEN_VARIABLE, "").encode()
        if not self._token:
            raise RuntimeError(f"{TOKEN_VARIABLE} is not set: start servers with `rlox-grpo serve`")
        self._weights = "none"
        self._requests = 0
        self._named: dict[bytes, asyncio.Event] = {}
        """Name of a running request → event that is set when it is cancelled."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI request."""
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        headers = dict(scope.get("headers", ()))
        if scope["type"] == "http" and scope["path"] == "/health":
            return await self._app(scope, receive, send)
        if not self._allows(headers):
            return await _refuse(scope, send, 401, "a bearer token is needed")
        size = headers.get(b"content-length", b"0")
        # The digits are checked first, because int() takes quadratic time in their number.
        if len(size) > 15 or not size.isdigit() or int(size) > MOST_BODY_BYTES:
            return await _refuse(scope, send, 413, f"one request may have {MOST_BODY_BYTES} bytes")
        if self._requests >= MOST_REQUESTS:
            return await _refuse(scope, send, 503, f"{MOST_REQUESTS} requests run already")
        name = headers.get(NAME_HEADER.encode(), b"")
        if scope["path"] == CANCEL_PATH:
            return await self._cancel(name.split(b","), send)
        self._requests += 1
        cancelled = asyncio.Event()
        if name:
            self._named[name] = cancelled
        try:
            await self._answer(scope, headers, receive, send, cancelled)
        finally:
            self._requests -= 1
            if name and self._named.get(name) is cancelled:
                del self._named[name]

    async def _cancel(self, names: Sequence[bytes], send: Send) -> None:
        """Cancel running requests; ignore names of other requests."""
        for name in names:
            if name in self._named:
                self._named[name].set()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": b"{}"})

    async def _answer(
        self, scope: Scope, headers: dict[bytes, bytes], receive: Receive, send: Send, cancelled: asyncio.Event
    ) -> None:
        """Forward an authorised request, limit its body, and add the mark to its answer."""
        named = headers.get(WEIGHTS_HEADER, b"").decode("latin-1")
        if named == LOADING:
            self._weights = LOADING
        held = self._weights
        started = is_stream = False

        async def stamped(message: MutableMapping[str, Any]) -> None:
            nonlocal started, is_stream
            if cancelled.is_set() and not started:
                return  # answered below
            started = True
            mark = held if held == self._weights else LOADING
            if message["type"] == "http.response.start":
                is_stream = any(
                    name.lower() == b"content-type" and value.startswith(b"text/event-stream")
                    for name, value in message.get("headers", ())
                )
                if named and named != LOADING and message["status"] == 200:
                    mark = self._weights = named
                message["headers"] = [*message.get("headers", ()), (WEIGHTS_HEADER, mark.encode("latin-1"))]
            elif is_stream and not message.get("more_body", False):
                message["body"] = message.get("body", b"") + f"{END_MARK}{mark}\n\n".encode("latin-1")
            await send(message)

        body = _BoundedBody(receive, cancelled)
        try:
            await self._app(scope, body.receive, stamped)
        except Exception:
            if body.refusal is None:
                raise
        if cancelled.is_set() and body.refusal is None and not started:
            body.refusal = (CANCELLED, "another request cancelled this one")
        if body.refusal is not None and not started:
            await _refuse(scope, send, *body.refusal)

    def _allows(self, headers: dict[bytes, bytes]) -> bool:
        scheme, _, credentials = headers.get(b"authorization", b"").partition(b" ")
        return scheme.lower() == b"bearer" and secrets.compare_digest(credentials, self._token)


class _BoundedBody:
    """The ASGI messages of a request. Beyond a limit, the application gets ``http.disconnect``.

    Attributes:
        refusal: status and reason if a limit was exceeded; otherwise None.
    """

    def __init__(self, receive: Receive, cancelled: asyncio.Event) -> None:
        self._receive, self._cancelled = receive, cancelled
        self._left = MOST_BODY_BYTES
        self._deadline = time.monotonic() + BODY_SECONDS
        self._whole = False
        self.refusal: tuple[int, str] | None = None

    async def receive(self) -> MutableMapping[str, Any]:
        """Receive the next ASGI message."""
        if self._whole:  # the only message left is the end of the connection
            return await self._wait_for_end()
        try:
            message = await asyncio.wait_for(self._receive(), max(0.0, self._deadline - time.monotonic()))
        except asyncio.TimeoutError:  # another class than TimeoutError before Python 3.11
            return self._refuse(408, f"the body was not sent within {BODY_SECONDS:g} s")
        self._left -= len(message.get("body", b""))
        self._whole = not message.get("more_body", False)
        if self._left < 0:
            return self._refuse(413, f"one request may have {MOST_BODY_BYTES} bytes")
        return message

    async def _wait_for_end(self) -> MutableMapping[str, Any]:
        """Wait for the next message, or for the cancellation of the request."""
        message, cancelled = asyncio.ensure_future(self._receive()), asyncio.ensure_future(self._cancelled.wait())
        try:
            await asyncio.wait([message, cancelled], return_when=asyncio.FIRST_COMPLETED)
            return {"type": "http.disconnect"} if self._cancelled.is_set() else await message
        finally:
            message.cancel()
            cancelled.cancel()

    def _refuse(self, status: int, why: str) -> MutableMapping[str, Any]:
        self.refusal = (status, why)
        return {"type": "http.disconnect"}


async def _refuse(scope: Scope, send: Send, status: int, why: str) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    headers = [(b"www-authenticate", b"Bearer")] if status == 401 else []
    await send({"type": "http.response.start", "status": status, "headers": [*headers, (b"connection", b"close")]})
    await send({"type": "http.response.body", "body": why.encode() + b"\n"})
