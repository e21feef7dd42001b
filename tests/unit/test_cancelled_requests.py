"""Replies that are dropped are cancelled at their vLLM server: the guard's part and the client's."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import numpy as np
import pytest

from rlox_grpo.rollout.engines.calls import Limits
from rlox_grpo.rollout.engines.turns import TurnRequest
from rlox_grpo.rollout.engines.vllm.auth import CANCEL_PATH, CANCELLED, NAME_HEADER, TOKEN_VARIABLE, TokenGuard
from rlox_grpo.rollout.engines.vllm.in_flight import CancelledRequestError, InFlight
from rlox_grpo.rollout.engines.vllm.turns import ServerTurns
from rlox_grpo.types import Completion


@pytest.fixture
def guard(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A guard over an application that samples until its client is gone, as vLLM's paths do; ``stopped`` names those.

    Without ``starts`` it answers nothing then; else it has begun a stream of events.
    """
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await receive()  # the body
        if application.starts:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        application.running.set()
        message = await receive()
        assert message["type"] == "http.disconnect"
        application.stopped.append(dict(scope["headers"])[NAME_HEADER.encode()])
        if application.starts:
            await send({"type": "http.response.body", "body": b""})
        else:
            await send({"type": "http.response.start", "status": 200, "headers": []})  # of a None, as vLLM's does
            await send({"type": "http.response.body", "body": b"null"})

    application.running, application.stopped, application.starts = asyncio.Event(), [], False
    guard = TokenGuard(application)
    guard.application = application
    return guard


async def ask(guard: Any, path: str, names: str, token: str = "secret") -> list[Any]:
    sent: list[Any] = []
    bodies = [{"type": "http.request", "body": b"{}", "more_body": False}]

    async def receive() -> Any:
        return bodies.pop() if bodies else await asyncio.sleep(600)

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"authorization", f"Bearer {token}".encode()), (NAME_HEADER.encode(), names.encode())]
    await guard({"type": "http", "path": path, "headers": headers}, receive, send)
    return sent


@pytest.mark.parametrize("starts", [False, True])
def test_a_cancelled_request_looks_as_if_its_client_had_gone(guard: Any, starts: bool) -> None:
    async def run() -> list[Any]:
        guard.application.starts = starts
        asked = asyncio.ensure_future(ask(guard, "/v1/completions", "one"))
        await asyncio.wait_for(guard.application.running.wait(), 20)
        assert (await ask(guard, CANCEL_PATH, "one", token="other"))[0]["status"] == 401
        await asyncio.sleep(0)
        assert guard.application.stopped == []
        assert (await ask(guard, CANCEL_PATH, "two,one"))[0]["status"] == 200
        return await asyncio.wait_for(asked, 20)

    sent = asyncio.run(run())
    assert guard.application.stopped == [b"one"]
    assert sent[0]["status"] == (200 if starts else CANCELLED)
    assert len([message for message in sent if message["type"] == "http.response.start"]) == 1
    assert guard._named == {}


class Server:
    """Notes what is cancelled."""

    failures = (ConnectionError,)
    url = "http://s0:1"

    def __init__(self) -> None:
        self.cancelled: list[str] = []
        self.was_told = threading.Event()

    def cancel(self, names: Any, deadline: float) -> None:
        self.cancelled += names
        self.was_told.set()


def test_a_dropped_reply_is_cancelled_where_it_is_sampled_and_one_that_waits_is_never_asked_for() -> None:
    server: Any = Server()
    in_flight = InFlight()
    named: list[str] = []
    asked: list[int] = []
    running = threading.Event()

    def serve(request: TurnRequest, tell: Any) -> tuple[Completion, int]:
        with in_flight.named(request, server) as name:
            asked.append(request.episode[0])
            if request.episode[0] == 0:
                named.append(name)
                running.set()
                assert server.was_told.wait(30)
                raise RuntimeError("HTTP 499")  # what the guard answers
        return Completion(np.array([5]), np.zeros(1, np.float32), "stop"), 0

    session = ServerTurns(serve, 1, Limits(50), cancel=in_flight.cancel)
    first, second, third = (TurnRequest((prompt, 0), 0, np.array([3]), 4) for prompt in range(3))
    for request in (first, second, third):
        session.submit(request)
    assert running.wait(30)
    session.forget((1, 0))
    session.drop(first)
    assert len(session) == 1
    found: list[Any] = []
    deadline = time.monotonic() + 30
    while not found:
        assert time.monotonic() < deadline
        found = session.step()
    assert [request for request, _ in found] == [third]
    assert server.cancelled == named
    assert asked == [0, 2]
    session.abort()
    in_flight.close()


def test_what_fails_after_it_was_cancelled_is_no_failure_of_the_server() -> None:
    """Else the server would be left out, and another one asked."""
    in_flight = InFlight()
    server: Any = Server()

    def ask(key: int, is_dropped: bool) -> None:
        with in_flight.named(key, server):
            if is_dropped:
                in_flight.cancel([key])
            raise ConnectionError("closed")

    with pytest.raises(CancelledRequestError):
        ask(3, True)
    with pytest.raises(ConnectionError):
        ask(4, False)
    with pytest.raises(CancelledRequestError):
        ask(3, False)
    in_flight.close()


def test_a_server_that_cannot_be_told_is_left_in_peace() -> None:
    class Gone(Server):
        def cancel(self, names: Any, deadline: float) -> None:
            raise ConnectionError("it is gone")

    server: Any = Gone()
    in_flight = InFlight()
    with in_flight.named(3, server):
        in_flight.cancel([3])
    in_flight.close()
