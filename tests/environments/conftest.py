"""What the tests of other packages' environments share."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import lake
from rlox_grpo.config.records import EpisodeConfig
from rlox_grpo.rollout.episodes.play import play_episode

FOLDER = Path(__file__).parent


@pytest.fixture(scope="session")
def tokenizer(byte_tokenizer: Any) -> Any:
    return lake.make_tokenizer(byte_tokenizer)


@pytest.fixture(scope="session")
def model(make_tiny_model: Any, tokenizer: Any) -> Any:
    return lake.make_model(make_tiny_model, tokenizer)


@pytest.fixture(scope="session")
def expected(model: Any, tokenizer: Any, tmp_path_factory: Any) -> Any:
    """Episodes and weights of the game as an async function."""
    return lake.train(lake.walk, model, tokenizer, tmp_path_factory.mktemp("function"))


@pytest.fixture(scope="session")
def play() -> Any:
    """``play(environment, replies, row, **options)``: the outcome, and the messages that the policy was shown."""

    def run(environment: Any, replies: Any, row: Any = None, **options: Any) -> Any:
        said: list[str] = []
        source = iter(replies)
        outcome = play_episode(
            environment, row or {}, lambda: next(source), said.append, config=EpisodeConfig.create(**options)
        )
        return outcome, [line.removeprefix("user: ") for line in said if line.startswith("user: ")]

    return run


@pytest.fixture(scope="session")
def server(tmp_path_factory: Any) -> Any:
    """The URL of a running OpenEnv server; see lake_server.py."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    path = os.pathsep.join([str(FOLDER), str(FOLDER.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "uvicorn", "lake_server:app", "--port", str(port), "--log-level", "warning"]
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": path}
        )
    deadline = time.monotonic() + 120
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)
    yield f"http://127.0.0.1:{port}"
    process.terminate()
    process.wait(30)
