"""ASGI middleware of ``rlox-grpo serve``: a bearer token, bounds, and a header with the mark of the weights.

vLLM's own ``--api-key`` guards ``/v1`` and a few more prefixes; the paths that reload weights, run methods in the
workers and pause the server stay open. Here everything but ``/health`` needs the token.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

TOKEN_VARIABLE = "RLOX_GRPO_SERVER_TOKEN"
WEIGHTS_HEADER = b"x-rlox-weights"
LOADING = "loading"
END_MARK = ": x-rlox-weights "
"""Begins the line behind a stream's last event, with the mark that the header of a whole answer has."""

MOST_REQUESTS = 1024
"""Requests at a time; one more gets status 503, which clients try again."""
MOST_BODY_BYTES = 2**25
BODY_SECONDS = 60.0
"""For sending one request's body."""

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
    """Refuses requests without the token, and stamps each answer with the weights that the server held.

    A client that changes the weights says so by the header ``x-rlox-weights``: ``loading`` marks them as unusable from
    the request on, any other value is theirs from the moment that the request has succeeded. Every answer carries the
    mark that stood when its request came in, and ``loading`` if it changed since. A server that was started again
    carries ``none``, so a client notices weights that are not the ones it sent. The headers of a stream of events are
    sent before its tokens are sampled, so the mark stands once more behind its last event, in a comment.
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app
        self._token = os.environ.get(TOKEN_VARIABLE, "").encode()
        if not self._token:
            raise RuntimeError(f"{TOKEN_VARIABLE} is not set: start servers with `rlox-grpo serve`")
        self._weights = "none"
        self._requests = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request; ASGI."""
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        headers = dict(scope.get("headers", ()))
        if scope["type"] == "http" and scope["path"] == "/health":
            return await self._app(scope, receive, send)
        if not self._allows(headers):
            return await _refuse(scope, send, 401, "a bearer token is needed")
        size = headers.get(b"content-length", b"0")
        # Digits alone, and few of them: int() takes quadratic time.
        if len(size) > 15 or not size.isdigit() or int(size) > MOST_BODY_BYTES:
            return await _refuse(scope, send, 413, f"one request may have {MOST_BODY_BYTES} bytes")
        if self._requests >= MOST_REQUESTS:
            return await _refuse(scope, send, 503, f"{MOST_REQUESTS} requests run already")
        self._requests += 1
        try:
            await self._answer(scope, headers, receive, send)
        finally:
            self._requests -= 1

    async def _answer(self, scope: Scope, headers: dict[bytes, bytes], receive: Receive, send: Send) -> None:
        """Pass an allowed request on, its body bounded and its answer stamped."""
        named = headers.get(WEIGHTS_HEADER, b"").decode("latin-1")
        if named == LOADING:
            self._weights = LOADING
        held = self._weights
        started = is_stream = False

        async def stamped(message: MutableMapping[str, Any]) -> None:
            nonlocal started, is_stream
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

        body = _BoundedBody(receive)
        try:
            await self._app(scope, body.receive, stamped)
        except Exception:
            if body.refusal is None:
                raise
        if body.refusal is not None and not started:
            await _refuse(scope, send, *body.refusal)

    def _allows(self, headers: dict[bytes, bytes]) -> bool:
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        return scheme.lower() == b"bearer" and secrets.compare_digest(given, self._token)


class _BoundedBody:
    """The messages of a request; past a bound the application finds its client gone.

    Attributes:
        refusal: Status and reason once a bound was passed.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._left = MOST_BODY_BYTES
        self._deadline = time.monotonic() + BODY_SECONDS
        self._whole = False
        self.refusal: tuple[int, str] | None = None

    async def receive(self) -> MutableMapping[str, Any]:
        """The next message; ASGI."""
        if self._whole:  # only the end of the connection is still to come
            return await self._receive()
        try:
            message = await asyncio.wait_for(self._receive(), max(0.0, self._deadline - time.monotonic()))
        except asyncio.TimeoutError:  # another class than TimeoutError before Python 3.11
            return self._refuse(408, f"the body was not sent within {BODY_SECONDS:g} s")
        self._left -= len(message.get("body", b""))
        self._whole = not message.get("more_body", False)
        if self._left < 0:
            return self._refuse(413, f"one request may have {MOST_BODY_BYTES} bytes")
        return message

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
