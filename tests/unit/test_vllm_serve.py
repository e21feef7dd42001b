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

    def run(*words):
        found = []
        monkeypatch.setattr(serve.os, "execve", lambda *given: found.extend(given))
        assert main(["serve", str(tmp_path), "--port", "0", *words]) == 0
        path, command, environment = found
        assert path == command[0] == sys.executable
        return " ".join(command), environment

    return run


def test_serve_becomes_vllms_server_with_the_token_in_its_environment(started, monkeypatch, capsys):
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
    assert "vLLM is starting; it will listen on 127.0.0.1:0" in capsys.readouterr().err  # its own first line comes late


def test_the_server_itself_finds_what_depends_on_its_device(started, monkeypatch):
    """``rlox-grpo serve`` becomes the server before torch is imported, which the server does in any case."""
    monkeypatch.setenv(TOKEN_VARIABLE, "secret words")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)  # vLLM in this process may have set it
    monkeypatch.setattr(serve, "_has_gpu", lambda: False)
    command, environment = started()
    assert "--dtype" not in command
    assert "--enforce-eager" not in command
    assert "TORCHDYNAMO_DISABLE" not in environment
    monkeypatch.setattr(sys, "argv", command.split()[2:])
    monkeypatch.setattr(server_process.os, "environ", dict(os.environ))
    server_process.use_device_settings()
    words = " ".join(sys.argv)
    assert words.startswith(f"{server_process.__name__} --dtype float32 --enforce-eager --no-enable-chunked-prefill ")
    executor = "--distributed-executor-backend vllm.v1.executor.uniproc_executor.UniProcExecutor"
    assert f'{executor} --hf-overrides {{"head_dtype": "float32"}} --model ' in words
    assert server_process.os.environ["TORCHDYNAMO_DISABLE"] == "1"
    assert server_process.os.environ["VLLM_CPU_KVCACHE_SPACE"] == "7"  # the user's


def test_the_user_s_settings_of_a_server_win(monkeypatch):
    monkeypatch.setattr(serve, "_has_gpu", lambda: False)
    head = ["--hf-overrides", '{"head_dtype": "float32"}']
    words, _ = serve.find_device_settings(["--dtype", "bfloat16", "--tensor-parallel-size", "2"])
    assert words == ["--enforce-eager", "--no-enable-chunked-prefill", *head]
    monkeypatch.setattr(serve, "_has_gpu", lambda: True)
    words, variables = serve.find_device_settings(["--dtype", "bfloat16"])
    assert words == [*head, "--weight-transfer-config", '{"backend": "nccl"}']
    words, _ = serve.find_device_settings(["--dtype", "bfloat16", "--no-fp32-lm-head"])
    assert words == ["--weight-transfer-config", '{"backend": "nccl"}']
    assert not variables


def test_a_model_that_cannot_be_read_ends_the_server_in_words(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(serve, "_has_gpu", lambda: False)
    monkeypatch.setattr(sys, "argv", ["server", "--model", str(tmp_path / "nowhere")])
    with pytest.raises(SystemExit) as ended:
        server_process.use_device_settings()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("rlox-grpo: ")


@pytest.mark.skipif(sys.platform == "win32", reason="execve")
def test_serve_needs_no_torch(tmp_path):
    """An import of torch and transformers takes seconds, and the server that it becomes imports them again."""
    program = (
        "import os, sys\n"
        "from rlox_grpo.rollout.engines.vllm import serve\n"
        "serve.check_vllm_version = lambda: None\n"
        "os.execve = lambda *given: print('torch' in sys.modules, 'transformers' in sys.modules)\n"
        "from rlox_grpo.cli import main\n"
        "main(['serve', 'model', '--port', '0'])\n"
    )
    environment = {**os.environ, TOKEN_VARIABLE: "secret"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout == "False False\n", done.stderr


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


ENGINE = """
import os, time

def engine():
    os.write(1, f"{os.getpid()}\\n".encode())  # in one piece, which print is not with PYTHONUNBUFFERED
    time.sleep(600)
"""
SERVER = """
import multiprocessing, os, time
from vllm.engine import engine

print("the server is imported", flush=True)
if __name__ == "__main__":
    children = [multiprocessing.get_context(how).Process(target=engine) for how in ("spawn", "fork")]
    for child in children:
        os.write(1, f"{type(child).__name__}\\n".encode())
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
@pytest.mark.parametrize(("words", "spawned"), [([], "Fork"), (["--tensor-parallel-size", "2"], "Spawn")])
def test_the_engines_of_a_killed_server_end(tmp_path, words, spawned):
    """A program stands for vLLM's server, with engines that multiprocessing spawns and forks.

    Spawned engines do not import the server, which would take vLLM's seconds. An engine without workers is forked.
    """
    package = tmp_path / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for folder in (tmp_path / "vllm", package.parent, package):
        (folder / "__init__.py").touch()  # else an installed vLLM would be found first
    (package / "api_server.py").write_text(SERVER)
    (tmp_path / "vllm" / "engine.py").write_text(ENGINE)
    (tmp_path / "uvicorn" / "protocols" / "http").mkdir(parents=True)
    (tmp_path / "uvicorn" / "__init__.py").write_text("class Server:\n    shutdown = None\n")
    (tmp_path / "uvicorn" / "protocols" / "http" / "auto.py").write_text("class AutoHTTPProtocol:\n    pass\n")
    command = [sys.executable, "-m", server_process.__name__, *words]
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as server:
        limit = threading.Timer(240, server.kill)  # the reads below end with the server
        limit.start()
        try:
            assert server.stdout.readline() == "the server is imported\n"
            said = [server.stdout.readline().strip() for _ in range(4)]
            assert sorted(word for word in said if not word.isdigit()) == sorted([f"{spawned}Process", "ForkProcess"])
            engines = [word for word in said if word.isdigit()]
            assert all(is_alive(engine) for engine in engines)
        finally:
            limit.cancel()
            server.kill()
        server.wait()
        deadline = time.monotonic() + 60
        while any(is_alive(engine) for engine in engines):
            assert time.monotonic() < deadline
            time.sleep(0.05)
