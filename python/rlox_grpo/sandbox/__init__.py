"""Sandbox for code that a model wrote: no network, none of the user's files, no other processes, limited resources.

``python`` is the tool of :func:`python_tool` with the default limits. The tool is created by the import, so that a
system on which the sandbox does not work raises the error then and not at the first call.
"""

from typing import Any

from rlox_grpo.sandbox.client import Sandbox, get_sandbox, python_tool
from rlox_grpo.sandbox.results import Limits, SandboxError, ScriptResult, TestsResult

__all__ = ["Limits", "Sandbox", "SandboxError", "ScriptResult", "TestsResult", "get_sandbox", "python_tool"]


def __getattr__(name: str) -> Any:
    if name != "python":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return python_tool()
