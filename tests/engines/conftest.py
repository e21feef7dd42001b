"""One launcher with one vLLM server for all tests of servers: a start takes longer than most of them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from byte_model import SERVED

from rlox_grpo.rollout.engines.vllm.auth import TOKEN_VARIABLE
from rlox_grpo.rollout.engines.vllm.records import FOLDER_VARIABLE

HERE = Path(__file__).parent
RESTARTS = int(os.environ.get("RLOX_GRPO_KILL_ROUNDS", "1"))
"""Of the server; test_vllm_server_kills.py uses them up, so files that need the server have names before it."""


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items):
    """For ``pytest -n 2 --dist loadgroup``: the files that share the server in one worker, the others file by file."""
    for item in items:
        if item.path.parent == HERE:
            needs_server = item.path.name.startswith(("test_vllm_episodes", "test_vllm_server"))
            item.add_marker(pytest.mark.xdist_group("server" if needs_server else item.path.stem))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="session")
def launcher(make_tiny_model, byte_tokenizer, tmp_path_factory):
    """``rlox-grpo serve`` on a random model. Its records and token are the tests' own."""
    folder = tmp_path_factory.mktemp("server")
    make_tiny_model("qwen2", **SERVED).save_pretrained(folder / "model")
    byte_tokenizer.save_pretrained(folder / "model")
    os.environ[FOLDER_VARIABLE] = str(folder / "state")
    os.environ.pop(TOKEN_VARIABLE, None)
    port = free_port()
    command = [sys.executable, "-m", "rlox_grpo.cli", "serve", str(folder / "model"), "--port", str(port)]
    command += ["--max-length", "256", "--restarts", str(RESTARTS), "--log-dir", str(folder), "--max-num-seqs", "16"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said = []
    reader = threading.Thread(target=lambda: said.extend(process.stdout))
    reader.start()
    process.url, process.model, process.restarts = f"http://127.0.0.1:{port}", folder / "model", RESTARTS
    process.said, process.reader = said, reader
    deadline = time.monotonic() + 580
    while not any(line.startswith("ready:") for line in said):
        assert process.poll() is None, said
        assert time.monotonic() < deadline, said
        time.sleep(0.2)
    yield process
    process.send_signal(signal.SIGTERM)
    process.wait(30)
    reader.join()
    process.stdout.close()
    del os.environ[FOLDER_VARIABLE]
