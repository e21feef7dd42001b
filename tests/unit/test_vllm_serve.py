"""What the launcher of servers notices of them; a small program stands for vLLM."""

import signal
import socket
import subprocess
import sys

import pytest

from rlox_grpo.rollout.engines.vllm.serve import _Server

PROGRAM = """
import socket, sys
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print("listens", flush=True)
sys.stdin.readline()
listener.close()
print("closed", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def server(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    server = _Server(f"http://127.0.0.1:{port}", (), {}, tmp_path / "log", 0)
    command = [sys.executable, "-c", PROGRAM, str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server.process:
        assert server.process.stdout.readline() == "listens\n"
        yield server
        server.process.kill()


def test_one_that_runs_and_listens_is_left_alone(server):
    assert server.how_it_ended() is None


def test_one_that_waits_for_its_dead_engine_has_ended(server):
    server.process.stdin.write("close\n")
    server.process.stdin.flush()
    assert server.process.stdout.readline() == "closed\n"
    assert server.how_it_ended() == "no longer listens"


def test_one_that_was_killed_is_said_to_have_died(server):
    server.process.send_signal(signal.SIGKILL)
    server.process.wait()
    assert server.how_it_ended() == "died with status -9"
