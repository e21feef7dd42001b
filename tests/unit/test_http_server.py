"""The bounded HTTP server apart from the services that use it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from rlox_grpo.distributed.http_server import Answer, Bounds, Service, make_bounded_server


def test_connections_that_come_at_once_are_all_answered() -> None:
    """An agent's calls come together, while the thread that accepts them waits for the interpreter."""
    service = Service(lambda _: True, lambda *_: Answer(200, b"{}"), lambda *_: Answer(200, b"{}"), frozenset())
    server = make_bounded_server(service, bounds=Bounds(connections=64))
    with ExitStack() as stack:
        stack.callback(server.server_close)
        clients = []
        for _ in range(64):  # nothing accepts them yet
            client = stack.enter_context(socket.create_connection(server.server_address[:2], timeout=0.5))
            client.settimeout(60)
            client.sendall(b"GET / HTTP/1.1\r\n\r\n")
            clients.append(client)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        stack.callback(server.shutdown)
        assert {client.recv(12) for client in clients} == {b"HTTP/1.1 200"}


@pytest.mark.parametrize(
    "begun",
    [b"", b"POST / HTTP/1.1\r\nX: ", b"POST / HTTP/1.1\r\nAuthorization: yes\r\nContent-Length: 9\r\n\r\n{"],
)
def test_a_request_that_never_ends_gives_way(begun: bytes) -> None:
    service = Service(lambda _: True, lambda *_: Answer(200, b"{}"), lambda *_: Answer(200, b"{}"), frozenset({"/"}))
    bounds = Bounds(connections=3, give_way_seconds=0.2, header_seconds=600.0, body_seconds=600.0)
    with make_bounded_server(service, bounds=bounds) as server, ExitStack() as stack:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        stack.callback(server.shutdown)

        def connect(request: bytes) -> socket.socket:
            client = stack.enter_context(socket.create_connection(server.server_address[:2], timeout=60))
            client.sendall(request)
            return client

        for _ in range(3):
            connect(begun)
        time.sleep(0.5)
        for _ in range(3):  # the first ones give way; these are complete and are answered
            assert connect(b"GET / HTTP/1.1\r\nAuthorization: yes\r\n\r\n").recv(12) == b"HTTP/1.1 200"


@pytest.fixture
def ask() -> Iterator[Callable[[bytes], bytes]]:
    """``ask(request)``: the first line of the answer, empty without one; two connections, and the token "yes"."""
    service = Service(
        lambda given: True if given == "Bearer yes" else None,
        lambda *_: Answer(200, b"{}"),
        lambda *_: Answer(200, b"{}"),
        frozenset({"/"}),
    )
    with make_bounded_server(service, bounds=Bounds(connections=2)) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()

        def send(request: bytes) -> bytes:
            with socket.create_connection(server.server_address[:2], timeout=60) as client:
                client.sendall(request)
                try:
                    return client.makefile("rb").readline().strip()
                except ConnectionResetError:  # it closed the connection before it read the request
                    return b""

        yield send
        server.shutdown()


@pytest.mark.parametrize(("token", "said"), [(b"yes", b"100 Continue"), (b"no", b"401 Unauthorized")])
def test_a_body_is_asked_for_only_with_a_token(ask: Callable[[bytes], bytes], token: bytes, said: bytes) -> None:
    request = b"POST / HTTP/1.1\r\nAuthorization: Bearer %b\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n"
    assert ask(request % token) == b"HTTP/1.1 " + said


def test_a_thread_that_the_system_refuses_keeps_no_connection(
    ask: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = b"GET / HTTP/1.1\r\nAuthorization: Bearer yes\r\n\r\n"

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert [ask(request) for _ in range(4)] == [b""] * 4
    assert ask(request) == b"HTTP/1.1 200 OK"
