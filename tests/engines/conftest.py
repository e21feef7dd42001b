"""One vLLM server for all tests of servers: a start takes longer than most of them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from byte_model import SERVED

from rlox_grpo.rollout.engines.vllm.auth import TOKEN_VARIABLE

TOKEN = "a-token-of-the-tests-that-nobody-guesses"


FIRST = (
    "test_vllm_server_kills.py",
    "test_deepspeed.py",
    "test_deepspeed_start.py",
    "test_vllm_training.py",
    "test_vllm_episodes_ranks.py",
    "test_two_hosts.py",
    "test_vllm_episodes.py",
    "test_vllm_server.py",
    "test_vllm_engine.py",
)
"""The files that take longest, and DeepSpeed's before vLLM runs in the process of a worker; the others come after."""


def pytest_collection_modifyitems(items):
    """Put the longest files first: pytest-xdist hands them out in this order, and the short ones fill the end."""
    places = {name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(item.path.name, len(FIRST)))


TOGETHER = (
    ("test_vllm_episodes.py", "test_vllm_server.py"),  # the server
    ("test_deepspeed.py", "test_deepspeed_start.py"),  # the process with DeepSpeed from which ranks are forked
    ("test_vllm_training.py", "test_vllm_episodes_ranks.py"),  # the process with vLLM from which ranks are forked
)
"""Files of one worker, and what they share. The longest file that needs the server starts one of its own, so that two
workers end at about the same time."""


def pytest_xdist_make_scheduler(config, log):
    """For ``pytest -n 2``: the files of :data:`TOGETHER` in one worker, the others file by file.

    Not by pytest-xdist's own groups: they are without effect from pytest 9.2 on.
    """
    from xdist.scheduler import LoadFileScheduling

    class ByWhatIsShared(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            names = (names for names in TOGETHER if Path(file).name in names)
            return next(map(str, names), file)

    return ByWhatIsShared(config, log)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Launcher:
    """``rlox-grpo serve`` on a random model: the process is vLLM's server. It can be started again at its address."""

    def __init__(self, model: Path) -> None:
        port = free_port()
        self.model, self.url, self._log = model, f"http://127.0.0.1:{port}", model.with_name("server.log")
        self._command = [sys.executable, "-m", "rlox_grpo", "serve", str(model), "--port", str(port)]
        self._command += ["--max-length", "256", "--max-num-seqs", "16"]

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=subprocess.STDOUT)

    def said(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_until_ready(self, seconds: float = 580.0) -> None:
        deadline = time.monotonic() + seconds
        while not self._is_healthy():
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.2)

    def _is_healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", trust_env=False).status_code == 200
        except httpx.TransportError:
            return False


@pytest.fixture(scope="session")
def launcher(make_tiny_model, byte_tokenizer, tmp_path_factory):
    """A server that is ready; its token is in the environment."""
    folder = tmp_path_factory.mktemp("server")
    make_tiny_model("qwen2", **SERVED).save_pretrained(folder / "model")
    byte_tokenizer.save_pretrained(folder / "model")
    os.environ[TOKEN_VARIABLE] = TOKEN
    server = Launcher(folder / "model")
    server.start()
    server.wait_until_ready()
    yield server
    server.process.terminate()
    server.process.wait(60)
    del os.environ[TOKEN_VARIABLE]
