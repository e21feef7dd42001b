"""The command and the environment of ``rlox-grpo serve``, and how its process ends."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType

import pytest

from rlox_grpo.cli import main
from rlox_grpo.rollout.engines.vllm import serve, server_process
from rlox_grpo.rollout.engines.vllm.auth import TOKEN_VARIABLE


@pytest.fixture
def started(make_tiny_model, monkeypatch, tmp_path):
    """``started(*words)``: the command and the environment that ``rlox-grpo serve`` would become."""
    make_tiny_model("qwen2", tie_word_embeddings=False).save_pretrained(tmp_path)
    monkeypatch.setattr(serve, "check_vllm_version", lambda: None)
    monkeypatch.setattr(serve, "_has_gpu", lambda: False)

    def run(*words):
        found = []
        monkeypatch.setattr(serve.os, "execve", lambda *given: found.extend(given))
        assert main(["serve", str(tmp_path), "--port", "0", *words]) == 0
        path, command, environment = found
        assert path == command[0] == sys.executable
        return " ".join(command), environment

    return run


def test_serve_becomes_vllms_server_with_the_token_in_its_environment(started, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, "secret words")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    command, environment = started("--max-length", "64", "--dtype", "bfloat16", "--tensor-parallel-size", "2")
    assert command.startswith(f"{sys.executable} -m rlox_grpo.rollout.engines.vllm.server_process --model ")
    assert "--host 127.0.0.1 --port 0 --dtype bfloat16 " in command
    assert "--middleware rlox_grpo.rollout.engines.vllm.auth.TokenGuard" in command
    assert "--max-model-len 64" in command
    assert command.endswith(" --tensor-parallel-size 2")
    assert "secret" not in command
    assert environment[TOKEN_VARIABLE] == environment["VLLM_API_KEY"] == "secret words"
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in environment


def test_serve_without_a_token_says_how_to_make_one(monkeypatch, capsys):
    monkeypatch.setattr(serve, "check_vllm_version", lambda: None)
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    assert main(["serve", "model"]) == 2
    assert f"export {TOKEN_VARIABLE}=$(openssl rand -hex 32)" in capsys.readouterr().err


def test_a_server_that_hangs_as_it_stops_ends(monkeypatch):
    """As vLLM does once its engine is dead; a double stands for uvicorn."""
    ended, statuses = threading.Event(), []

    class Server:
        async def shutdown(self, sockets=None):
            await asyncio.to_thread(ended.wait, 20.0)

    uvicorn = ModuleType("uvicorn")
    uvicorn.Server = Server
    monkeypatch.setitem(sys.modules, "uvicorn", uvicorn)
    monkeypatch.setattr(server_process.os, "_exit", lambda status: (statuses.append(status), ended.set()))
    server_process.bound_shutdown(0.05)
    asyncio.run(Server().shutdown())
    assert statuses == [1]


ENGINES = """
import multiprocessing, os, time

def engine():
    print(os.getpid(), flush=True)
    time.sleep(600)

if __name__ == "__main__":
    children = [multiprocessing.get_context(how).Process(target=engine) for how in ("spawn", "fork")]
    for child in children:
        child.start()
    time.sleep(600)
"""


def is_alive(process):
    """Whether it runs; a zombie that nobody waits for has ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_the_engines_of_a_killed_server_end(tmp_path):
    """A program stands for vLLM's server, with engines that multiprocessing spawns and forks."""
    package = tmp_path / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    (package / "api_server.py").write_text(ENGINES)
    (tmp_path / "uvicorn" / "protocols" / "http").mkdir(parents=True)
    (tmp_path / "uvicorn" / "__init__.py").write_text("class Server:\n    shutdown = None\n")
    (tmp_path / "uvicorn" / "protocols" / "http" / "auto.py").write_text("class AutoHTTPProtocol:\n    pass\n")
    command = [sys.executable, "-m", server_process.__name__]
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as server:
        engines = [server.stdout.readline().strip() for _ in range(2)]
        assert all(is_alive(engine) for engine in engines)
        server.kill()
        server.wait()
        deadline = time.monotonic() + 60
        while any(is_alive(engine) for engine in engines):
            assert time.monotonic() < deadline
            time.sleep(0.05)
