"""Run code that a model wrote, confined: no network, no files of the user, no other process, bounded resources.

``python`` is the tool of :func:`python_tool` with the default limits. It is made when it is imported, so that a system
that cannot confine refuses it there and not at the first call.
"""

from typing import Any

from rlox_grpo.sandbox.client import Sandbox, get_sandbox
from rlox_grpo.sandbox.results import Limits, SandboxError, ScriptResult, TestsResult
from rlox_grpo.sandbox.tool import python_tool

__all__ = ["Limits", "Sandbox", "SandboxError", "ScriptResult", "TestsResult", "get_sandbox", "python_tool"]


def __getattr__(name: str) -> Any:
    if name != "python":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return python_tool()
