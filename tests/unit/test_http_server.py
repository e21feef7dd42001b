"""The bounded HTTP server apart from the services that use it."""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack

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
