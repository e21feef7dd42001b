"""The servers' token guard over a scripted application."""

from __future__ import annotations

import asyncio

import pytest

from rlox_grpo.rollout.engines.vllm import auth
from rlox_grpo.rollout.engines.vllm.auth import LOADING, TOKEN_VARIABLE, TokenGuard

TOKEN = {"authorization": "Bearer secret"}


@pytest.fixture
def guard(monkeypatch):
    """A guard over an application that answers with the status its path names, after running ``during``."""
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")

    async def application(scope, receive, send):
        if scope["type"] != "http":
            return
        application.reached.append(scope["path"])
        while application.during:
            await application.during.pop()()
        status = int(scope["path"][1:]) if scope["path"][1:].isdigit() else 200
        await send({"type": "http.response.start", "status": status, "headers": [(b"x-own", b"1")]})
        await send({"type": "http.response.body", "body": b""})

    application.reached, application.during = [], []
    guard = TokenGuard(application)
    guard.application = application
    return guard


async def ask(guard, path="/v1/models", headers=TOKEN, kind="http"):
    sent = []

    async def send(message):
        sent.append(message)

    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await guard({"type": kind, "path": path, "headers": raw}, None, send)
    return sent


def mark(sent):
    return dict(sent[0]["headers"]).get(b"x-rlox-weights", b"").decode()


@pytest.mark.parametrize(
    "headers",
    [{}, {"authorization": "Bearer"}, {"authorization": "Bearer wrong"}, {"authorization": "Basic secret"}],
)
@pytest.mark.parametrize("path", ["/v1/models", "/collective_rpc", "/pause", "/health/", "//health", "/"])
def test_no_path_without_the_token(guard, path, headers):
    sent = asyncio.run(ask(guard, path, headers))
    assert sent[0]["status"] == 401
    assert guard.application.reached == []


def test_health_and_lifespan_are_open(guard):
    assert asyncio.run(ask(guard, "/health", {}))[0]["status"] == 200
    assert asyncio.run(ask(guard, kind="lifespan", headers={})) == []


def test_a_websocket_without_the_token_is_closed(guard):
    assert asyncio.run(ask(guard, kind="websocket", headers={})) == [{"type": "websocket.close", "code": 1008}]


def test_no_server_without_a_token(monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(RuntimeError, match=r"RLOX_GRPO_SERVER_TOKEN is not set"):
        TokenGuard(None)


def reading(seen):
    """An application that reads the whole body, as Starlette does, and answers 200."""

    async def application(scope, receive, send):
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ConnectionError("the client is gone")
            seen.append(message["body"])
            more = message["more_body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    return application


@pytest.fixture
def send_body(monkeypatch):
    """``send_body(parts, headers)``: the status, and what was read; a part that is None never comes."""
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")

    def run(parts, headers=TOKEN):
        left, seen, sent = list(parts), [], []

        async def receive():
            if left[0] is None:
                await asyncio.sleep(60)
            part = left.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(left)}

        async def send(message):
            sent.append(message)

        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "http", "path": "/v1/completions", "headers": raw}
        asyncio.run(TokenGuard(reading(seen))(scope, receive, send))
        return sent[0]["status"], seen

    return run


def test_a_body_is_read_only_with_the_token_and_within_its_bounds(send_body, monkeypatch):
    monkeypatch.setattr(auth, "MOST_BODY_BYTES", 10)
    monkeypatch.setattr(auth, "BODY_SECONDS", 0.1)
    assert send_body([b"12345", b"67890"]) == (200, [b"12345", b"67890"])
    assert send_body([b"12345"], {}) == (401, [])
    for size in ("11", "9" * 5000, "-1", "1e1"):
        assert send_body([b"12345"], {**TOKEN, "content-length": size}) == (413, []), size
    assert send_body([b"12345", b"67890", b"1"]) == (413, [b"12345", b"67890"])
    assert send_body([b"12345", None]) == (408, [b"12345"])


def test_an_error_of_the_application_stays_one(send_body, monkeypatch):
    async def fail(scope, receive, send):
        raise KeyError("its own")

    guard = TokenGuard(fail)
    with pytest.raises(KeyError, match="its own"):
        asyncio.run(ask(guard))


def test_requests_at_a_time_have_a_bound(guard, monkeypatch):
    monkeypatch.setattr(auth, "MOST_REQUESTS", 1)

    async def story():
        statuses = []

        async def second():
            statuses.append((await ask(guard))[0]["status"])

        guard.application.during = [second]
        statuses.append((await ask(guard))[0]["status"])
        statuses.append((await ask(guard))[0]["status"])
        return statuses

    assert asyncio.run(story()) == [503, 200, 200]


def test_answers_name_the_weights(guard):
    async def story():
        marks = [mark(await ask(guard))]
        marks.append(mark(await ask(guard, "/collective_rpc", {**TOKEN, "x-rlox-weights": LOADING})))
        marks.append(mark(await ask(guard)))
        marks.append(mark(await ask(guard, "/500", {**TOKEN, "x-rlox-weights": "a:1"})))
        marks.append(mark(await ask(guard, "/resume", {**TOKEN, "x-rlox-weights": "a:1"})))
        marks.append(mark(await ask(guard)))
        return marks

    assert asyncio.run(story()) == ["none", LOADING, LOADING, LOADING, "a:1", "a:1"]


def test_an_answer_across_a_sync_is_of_neither_weights(guard):
    async def story():
        await ask(guard, "/resume", {**TOKEN, "x-rlox-weights": "a:1"})

        async def sync():
            await ask(guard, "/collective_rpc", {**TOKEN, "x-rlox-weights": LOADING})
            await ask(guard, "/resume", {**TOKEN, "x-rlox-weights": "a:2"})

        guard.application.during = [sync]
        first = mark(await ask(guard, "/v1/completions"))
        return first, mark(await ask(guard))

    assert asyncio.run(story()) == (LOADING, "a:2")


def streaming(parts):
    """An application that sends a stream of events, and runs each part's coroutine before it."""

    async def application(scope, receive, send):
        kind = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": kind})
        for text, before in parts:
            await before()
            await send({"type": "http.response.body", "body": text, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    return application


@pytest.mark.parametrize("changes", [False, True])
def test_the_weights_stand_behind_a_stream(guard, changes):
    """Its headers are sent before its tokens are sampled, so they do not say what sampled them."""
    loading = {**TOKEN, "x-rlox-weights": LOADING}

    async def nothing():
        pass

    async def sync():
        whole, guard._app = guard._app, guard.application
        await ask(guard, "/collective_rpc", loading)
        await ask(guard, "/resume", {**TOKEN, "x-rlox-weights": "a:2"})
        guard._app = whole

    async def story():
        await ask(guard, "/resume", {**TOKEN, "x-rlox-weights": "a:1"})
        guard._app = streaming([(b"data: 1\n\n", nothing), (b"data: [DONE]\n\n", sync if changes else nothing)])
        return await ask(guard, "/v1/completions")

    sent = asyncio.run(story())
    body = b"".join(part.get("body", b"") for part in sent)
    end = LOADING if changes else "a:1"
    assert mark(sent) == "a:1"
    assert body.decode() == f"data: 1\n\ndata: [DONE]\n\n{auth.END_MARK}{end}\n\n"
