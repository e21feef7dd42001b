"""ASGI middleware of ``rlox-grpo serve``: a bearer token for every path, and a header with the mark of the weights.

vLLM's own ``--api-key`` guards ``/v1`` and a few more prefixes; the paths that reload weights, run methods in the
workers and pause the server stay open. Here everything but ``/health`` needs the token.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

TOKEN_VARIABLE = "RLOX_GRPO_SERVER_TOKEN"
WEIGHTS_HEADER = b"x-rlox-weights"
LOADING = "loading"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class TokenGuard:
    """Refuses requests without the token, and stamps each answer with the weights that the server held.

    A client that changes the weights says so by the header ``x-rlox-weights``: ``loading`` marks them as unusable from
    the request on, any other value is theirs from the moment that the request has succeeded. Every answer carries the
    mark that stood when its request came in, and ``loading`` if it changed since. A server that was started again
    carries ``none``, so a client notices weights that are not the ones it sent.
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app
        self._token = os.environ.get(TOKEN_VARIABLE, "").encode()
        if not self._token:
            raise RuntimeError(f"{TOKEN_VARIABLE} is not set: start servers with `rlox-grpo serve`")
        self._weights = "none"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request; ASGI."""
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        headers = dict(scope.get("headers", ()))
        if scope["type"] == "http" and scope["path"] == "/health":
            return await self._app(scope, receive, send)
        if not self._allows(headers):
            return await _refuse(scope, send)
        named = headers.get(WEIGHTS_HEADER, b"").decode("latin-1")
        if named == LOADING:
            self._weights = LOADING
        held = self._weights

        async def stamped(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                mark = held if held == self._weights else LOADING
                if named and named != LOADING and message["status"] == 200:
                    mark = self._weights = named
                message["headers"] = [*message.get("headers", ()), (WEIGHTS_HEADER, mark.encode("latin-1"))]
            await send(message)

        await self._app(scope, receive, stamped)

    def _allows(self, headers: dict[bytes, bytes]) -> bool:
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        return scheme.lower() == b"bearer" and secrets.compare_digest(given, self._token)


async def _refuse(scope: Scope, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    await send({"type": "http.response.start", "status": 401, "headers": [(b"www-authenticate", b"Bearer")]})
    await send({"type": "http.response.body", "body": b"a bearer token is needed\n"})
