"""The tool ``python``: it runs code of the policy in the sandbox and returns the output."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from rlox_grpo.sandbox.client import get_sandbox
from rlox_grpo.sandbox.results import Limits, ScriptResult

_LIMITS = {"cpu": "processor time", "wall": "time", "files": "room for files"}


def python_tool(limits: Limits | None = None) -> Callable[[str], Awaitable[str]]:
    """Return the tool ``python`` for ``GRPO(tools=[…])``, which runs a program and returns its output.

    Calls share no variables and files. The result is stdout, then stderr, then a line about a limit, signal or exit
    code that ended the program, if any. The option ``max_observation_chars`` limits its length.

    Args:
        limits: limits of one call.

    Raises:
        SandboxError: the sandbox does not work on this system; the message says what is missing.
    """
    bounds = limits or Limits()
    get_sandbox()

    async def python(code: str) -> str:
        """Run a Python program and return what it prints. It has the standard library, and no network.

        Args:
            code: the program; print what you want to see.
        """
        running = await asyncio.to_thread(lambda: get_sandbox().submit_script(code, limits=bounds))
        return _show(await asyncio.wrap_future(running))

    return python


def _show(result: ScriptResult) -> str:
    parts = [result.stdout.rstrip("\n"), result.stderr.rstrip("\n")]
    if result.cut:
        parts.insert(1, "[the rest of the output was cut]")
    if result.ended == "killed":
        parts.append("[the system killed the program, which had not reached its limits: run it again]")
    elif result.ended == "memory":
        parts.append("[the program had no memory left]")
    elif result.ended != "exit":
        parts.append(f"[the program was ended: no {_LIMITS[result.ended]} left]")
    elif result.code < 0:
        parts.append(f"[the program was ended by signal {-result.code}]")
    elif result.code > 0 and not result.stderr:
        parts.append(f"[the program ended with exit code {result.code}]")
    return "\n".join(part for part in parts if part) or "[the program printed nothing]"
