"""A request to a host whose network is cut while it works: it fails long before its deadline, without Ray or vLLM."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hosts import joined_hosts, or_skip

pytestmark = pytest.mark.cluster

DEADLINE_S = 240.0
HANGS = """
import socket, time
with socket.create_server(("10.77.0.2", 8000)) as server:
    print("listens", flush=True)
    connection, _ = server.accept()
    connection.recv(1024)
    print("asked", flush=True)
    time.sleep(600)
"""

ASKS = """
import time
from rlox_grpo.rollout.engines.vllm import connection
connection.SILENCE_SECONDS = 4
server = connection.ServerConnection("http://10.77.0.2:8000", 1)
start = time.monotonic()
try:
    server.post("/v1/completions", start + DEADLINE_S, json={})
except server.failures as error:
    print(type(error).__name__, time.monotonic() - start)
"""


@pytest.fixture
def hosts():
    yield from or_skip(joined_hosts(2))


def test_a_request_to_a_host_that_is_cut_off_fails_before_its_deadline(hosts):
    def start(host, program):
        words = host.command(sys.executable, "-c", f"DEADLINE_S = {DEADLINE_S}\n{program}")
        environment = {**os.environ, "RLOX_GRPO_SERVER_TOKEN": "token"}
        return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)

    server = start(hosts[1], HANGS)
    assert server.stdout.readline() == "listens\n"
    client = start(hosts[0], ASKS)
    assert server.stdout.readline() == "asked\n"
    hosts[1].set_cable("down")
    said, _ = client.communicate(timeout=900)
    name, seconds = said.split()
    assert name in ("ReadError", "ReadTimeout")
    assert float(seconds) < DEADLINE_S / 2
    server.kill()
    server.communicate()
