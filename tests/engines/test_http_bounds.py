"""Bounds on connections to uvicorn: clients that send slowly, or not at all, before they have shown a token."""

import asyncio
import contextlib
import socket
import threading
import time

import pytest

from rlox_grpo.rollout.engines.vllm.auth import TOKEN_VARIABLE, TokenGuard
from rlox_grpo.rollout.engines.vllm.http_bounds import HttpBounds, bound_protocol

pytestmark = pytest.mark.vllm
uvicorn = pytest.importorskip("uvicorn")

ASK = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.fixture(params=["httptools", "h11"])
def serve(request, monkeypatch):
    """``serve(**bounds)``: the port of a server that answers 200; stopped at the end."""
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    running = []

    async def application(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    def run(**bounds):
        if request.param == "httptools":
            from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as Protocol
        else:
            from uvicorn.protocols.http.h11_impl import H11Protocol as Protocol
        protocol = bound_protocol(Protocol, HttpBounds(**bounds))
        config = uvicorn.Config(TokenGuard(application), http=protocol, lifespan="off", log_config=None)
        server = uvicorn.Server(config)
        listening = socket.create_server(("127.0.0.1", 0))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])), daemon=True)
        thread.start()
        running.append((server, thread, listening))
        return listening.getsockname()[1]

    yield run
    for server, thread, listening in running:
        server.should_exit = True
        thread.join(20)
        listening.close()


def connect(port):
    return socket.create_connection(("127.0.0.1", port), timeout=20)


def ask(port):
    with connect(port) as connection:
        connection.sendall(ASK)
        return connection.recv(1000)


def is_cut_off(connection, text):
    """Whether the server closes a connection on which one byte arrives every 20 ms."""
    for byte in text:
        with contextlib.suppress(TimeoutError):
            try:
                connection.sendall(bytes([byte]))
                connection.settimeout(0.02)
                return connection.recv(1000) == b""
            except ConnectionError:
                return True
    return False


def test_headers_that_come_byte_by_byte_are_cut_off(serve):
    port = serve(header_seconds=0.5)
    with connect(port) as slow:
        assert is_cut_off(slow, b"GET /health HTTP/1.1\r\nX: " + b"a" * 2000)
    with connect(port) as silent:
        assert silent.recv(1000) == b""
    assert ask(port).startswith(b"HTTP/1.1 200")


def test_the_second_request_of_a_connection_has_the_same_bound(serve):
    port = serve(header_seconds=0.5)
    with connect(port) as kept:
        kept.sendall(ASK)
        answer = b""
        while not answer.endswith(b"ok"):
            answer += kept.recv(1000)
        assert is_cut_off(kept, b"GET /health HTTP/1.1\r\nX: " + b"a" * 2000)


def test_connections_and_headers_have_a_bound(serve):
    port = serve(connections=3, header_seconds=60.0, header_bytes=4096)
    held = [connect(port) for _ in range(3)]
    deadline = time.monotonic() + 20
    while not ask(port).startswith(b"HTTP/1.1 503"):
        assert time.monotonic() < deadline
    for connection in held:
        connection.close()
    while not ask(port).startswith(b"HTTP/1.1 200"):
        assert time.monotonic() < deadline
    with connect(port) as large:
        large.settimeout(20)
        try:
            for part in [ASK[:-2] + b"X: ", *[b"a" * 1000] * 40]:
                large.sendall(part)
                time.sleep(0.01)
            answer = large.recv(1000)
        except ConnectionError:
            answer = b""
    assert b" 200 " not in answer


def test_a_refused_request_ends_without_its_body(serve):
    port = serve()
    with connect(port) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\n")
        answer = b""
        while part := connection.recv(1000):
            answer += part
    assert answer.startswith(b"HTTP/1.1 401")
