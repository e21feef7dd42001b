"""The command and the environment of ``rlox-grpo serve``, and how its process ends."""

import asyncio
import sys
import threading
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
