"""What the tests of other packages' environments share."""

from __future__ import annotations

import copy
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import lake
import rlox_grpo
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


@pytest.fixture
def run_guide(model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: Any) -> Any:
    """``run_guide(page, heading, changes)``: the first program of a guide's section, one small step; its episodes.

    ``changes`` are replaced in its text. ``names`` are there before it; ``model`` takes the place of the tests' policy.
    """

    def run(page: str, heading: str, changes: Any = (), names: Any = (), model: Any = model) -> Any:
        section = (FOLDER.parents[1] / "docs/guides" / page).read_text().split(f"\n## {heading}\n")[1]
        code = section.split("```python\n")[1].split("```")[0]
        for old, new in dict(changes).items():
            assert old in code
            code = code.replace(old, new)

        def start(_: str, **options: Any) -> Any:
            sizes = {"group_size": 2, "prompts_per_step": 2, "max_steps": 1, "max_new_tokens": 1, "log_to": ()}
            given = {**options, **sizes, "call_format": "json", "output_dir": tmp_path}
            return whole(copy.deepcopy(model), tokenizer=tokenizer, **given)

        whole = rlox_grpo.GRPO
        monkeypatch.setattr(rlox_grpo, "GRPO", start)
        exec(compile(code, f"{page}, {heading}", "exec"), {"__name__": "guide", **dict(names)})  # noqa: S102
        return [json.loads(line) for line in (tmp_path / "completions/step_000001.jsonl").read_text().splitlines()]

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
