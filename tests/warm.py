"""Processes that start at once: forked from one that has imported torch, transformers and this library.

A new interpreter needs 8 s of processor time to import them, 12 s with vLLM, and the tests start dozens. :func:`run`
takes the place of ``torch.distributed.run`` where a test is about what the ranks do, and not about their launcher or
their exit.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

TIMEOUT_S = 600.0
TERM_S = 30.0
"""What torchrun gives the other ranks to end after one has failed, before it kills them."""


class Ended(NamedTuple):
    """A finished run: 0, or what its first failed process returned (minus the signal that killed it)."""

    returncode: int
    stderr: str
    """All that its processes printed."""


def run(ranks: int, script: Path, *arguments: object, loaded: tuple[str, ...] = (), **environment: str) -> Ended:
    """Run a script on so many ranks of this machine, or in a plain process (0), and wait for its end.

    Args:
        ranks: Number of processes; 0 is one without torchrun's variables.
        script: Runs as ``python script arguments``.
        arguments: Its arguments.
        loaded: Modules that are imported before the fork, too. Each set of them has a process of its own.
        environment: Variables of the script.
    """
    if sys.platform != "linux":  # elsewhere a process that has imported torch is not safe to fork
        return _run_anew(ranks, script, *arguments, **environment)
    with tempfile.NamedTemporaryFile(prefix="warm_", suffix=".log") as log:
        request = {
            "ranks": ranks,
            "script": str(script),
            "arguments": [str(argument) for argument in arguments],
            "environment": {"OMP_NUM_THREADS": _count_threads(ranks), **environment},
            "folder": os.getcwd(),
            "log": log.name,
        }
        process = _warm_process(loaded)
        process.stdin.write(json.dumps(request).encode() + b"\n")
        ready, _, _ = select.select([process.stdout], [], [], TIMEOUT_S + 2 * TERM_S)
        answer = process.stdout.readline() if ready else b""
        said = Path(log.name).read_text(errors="replace")
        assert answer, f"no end after {TIMEOUT_S:g} s: {said}"
        return Ended(json.loads(answer), said)


def _count_threads(ranks: int) -> str:
    """One for each rank. A script alone has those of the tests, with which its run is compared to the bit."""
    return "1" if ranks else os.environ.get("OMP_NUM_THREADS", "1")


def _run_anew(ranks: int, script: Path, *arguments: object, **environment: str) -> Ended:
    from ranked import torchrun

    ended = subprocess.run(
        [*(torchrun(ranks) if ranks else [sys.executable]), str(script), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        env={**os.environ, "OMP_NUM_THREADS": _count_threads(ranks), "HF_HUB_OFFLINE": "1", **environment},
        check=False,
    )
    return Ended(ended.returncode, ended.stdout)


@functools.cache
def _warm_process(loaded: tuple[str, ...]) -> subprocess.Popen:
    """Start the process that forks; it ends when its standard input is closed."""
    process = subprocess.Popen(
        [sys.executable, __file__, *loaded],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )

    def close() -> None:
        process.stdin.close()
        process.stdout.close()
        process.wait()

    atexit.register(close)
    return process


# --- in the warm process ---


def serve() -> None:
    """Fork a launcher for each request, one after another, and answer with its status."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a module prints when it is imported is no answer
    import peft  # noqa: F401
    import safetensors.torch  # noqa: F401
    import torch.distributed.fsdp
    import torch.distributed.tensor
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401

    import rlox_grpo
    from rlox_grpo.rollout.engines.vllm.startup import set_environment

    torch.set_num_threads(1)
    os.fsync = os.fstat  # as in tests/conftest.py: no wait for the disk
    assert rlox_grpo.GRPO  # loads the trainer
    if any(module.startswith("vllm.") for module in sys.argv[1:]):
        set_environment("float32")  # vLLM reads it when it is imported
    for module in sys.argv[1:]:
        importlib.import_module(module)
    for line in sys.stdin:
        launcher = os.fork()
        if launcher == 0:
            answers.close()
            os.setsid()
            os._exit(_launch(**json.loads(line)) & 0xFF)
        _, status = os.waitpid(launcher, 0)
        code = os.waitstatus_to_exitcode(status)
        print(code if code < 128 else code - 256, file=answers, flush=True)


def _launch(ranks: int, script: str, arguments: list[str], environment: dict[str, str], folder: str, log: str) -> int:
    """Start the ranks and wait for them; when one fails, end the others as torchrun does."""
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, place in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, place)
    os.chdir(folder)
    os.environ.update(environment)
    sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    living = {_start(script, arguments, _rank_variables(rank, ranks, port)) for rank in range(max(1, ranks))}
    if ranks:  # as in torchrun: the launcher holds the store
        from torch.distributed import TCPStore

        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    code, deadline = 0, time.monotonic() + TIMEOUT_S
    while living:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended == 0:
            if time.monotonic() > deadline:
                _signal_all(living, signal.SIGKILL)
            time.sleep(0.02)
            continue
        living.discard(ended)
        if (found := os.waitstatus_to_exitcode(status)) and not code:
            code, deadline = found, min(deadline, time.monotonic() + TERM_S)
            _signal_all(living, signal.SIGTERM)
    if ranks:
        del store
    return code


def _rank_variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    if ranks == 0:
        return {}
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    run = {"TORCHELASTIC_RUN_ID": "warm", "TORCHELASTIC_RESTART_COUNT": 0}
    return {name: str(value) for name, value in {**own, **meeting, **run}.items()}


def _start(script: str, arguments: list[str], variables: dict[str, str]) -> int:
    """Fork a process that runs the script as ``python script`` does. Returns its number."""
    process = os.fork()
    if process:
        return process
    os.environ.update(variables)
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    code = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001
        sys.excepthook(*sys.exc_info())
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _signal_all(processes: set[int], number: signal.Signals) -> None:
    for process in processes:
        os.kill(process, number)


if __name__ == "__main__":
    serve()
