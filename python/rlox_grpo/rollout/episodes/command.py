"""Environments that are programs: ``environment="command: python my_agent.py"`` starts one process for each episode.

The program gets the episode's OpenAI-compatible endpoint and the data row:

=================== ==================================================================
``OPENAI_BASE_URL`` the URL of the episode's endpoint, which ``openai.OpenAI()`` reads
``OPENAI_API_KEY``  its key
``RLOX_ROW_FILE``   the path of a file that holds the row as one JSON object
``RLOX_SEED``       ``chat.seed``, for the program's own random numbers
=================== ==================================================================

Its reward is the last line of its stdout: a JSON number, null (unscored), or an object with ``reward`` and perhaps
``metrics`` and ``stop_reason``. A program that writes nothing to stdout is paid by its exit code: 0 pays 1.0, and 1
pays 0.0 if it wrote nothing to stderr either. Every other end is an error of the environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlox_grpo.environments import Outcome
from rlox_grpo.errors import ConfigError
from rlox_grpo.rollout.episodes.chat import Chat

PREFIX = "command:"
"""What an environment begins with that is a command."""

MAX_COMMANDS = 32
"""Programs at the same time, unless the option ``max_live_episodes`` says how many."""

_KEPT = 64 * 1024
"""Bytes of stdout and of stderr that are kept, the last ones; the rest is read and dropped."""
_SHOWN = 1000
"""Characters of stderr in an error."""
_GRACE = 5.0
"""Seconds for what holds the streams of a killed process to let go of them."""

# Ends the program's group when the trainer dies: the guard's stdin is a pipe that only the trainer holds.
_GUARD = """
import os, signal, subprocess, sys, threading
program = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
def watch():
    os.read(0, 1)
    os.killpg(os.getpgid(0), signal.SIGKILL)
threading.Thread(target=watch, daemon=True).start()
code = program.wait()
os.write(3, str(code).encode())
threading.Event().wait()
"""


class CommandError(RuntimeError):
    """A program failed, or did not say a reward."""


def read_command(environment: str) -> list[str]:
    """The words of a command.

    Raises:
        ConfigError: no command, an unclosed quote, or a program that is not found.
    """
    try:
        words = shlex.split(environment.removeprefix(PREFIX))
    except ValueError as error:
        raise ConfigError(f"environment={environment!r} cannot be split into words: {error}") from None
    if not words:
        raise ConfigError(f"environment={environment!r} names no program: expected 'command: python my_agent.py'")
    if words[0] in ("python", "python3"):  # that of the trainer, whose packages the agent may need
        words[0] = sys.executable
    if shutil.which(words[0]) is None:
        raise ConfigError(f"environment={environment!r}: the program {words[0]!r} is not found")
    return words


def name_command(words: Sequence[str]) -> str:
    """A name for metrics: the program, or the script or module that Python runs, such as ``my_agent``."""
    named = [word for word in words[1:] if not word.startswith("-")] if words[0] == sys.executable else words[:1]
    return Path(named[0]).stem if named else "command"


def make_command(words: Sequence[str]) -> Callable[[Mapping[str, Any], Chat], Awaitable[Outcome]]:
    """An environment ``play(row, chat)`` of a command."""
    return functools.partial(play_command, words)


async def play_command(words: Sequence[str], row: Mapping[str, Any], chat: Chat) -> Outcome:
    """Run a program for one episode; see the module. What it started is killed when it ends, or when this is cancelled.

    Raises:
        CommandError: it failed, or its last line is no reward.
    """
    try:
        text = json.dumps(dict(row), default=_to_json)
    except (TypeError, ValueError) as error:
        raise CommandError(f"the row cannot be written as JSON: {error}") from error
    with tempfile.TemporaryDirectory(prefix="rlox_episode_") as folder:
        path = Path(folder) / "row.json"
        path.write_text(text)
        told = {"OPENAI_BASE_URL": chat.base_url, "OPENAI_API_KEY": chat.api_key}
        told |= {"RLOX_ROW_FILE": str(path), "RLOX_SEED": str(chat.seed)}
        code, stdout, stderr = await _run(words, {**os.environ, **told})
    return _read_outcome(code, stdout, stderr)


async def _run(words: Sequence[str], environment: Mapping[str, str]) -> tuple[int, bytes, bytes]:
    """Exit code and the ends of stdout and stderr."""
    loop = asyncio.get_running_loop()
    code_read, code_write = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-S", "-E", "-c", f"import os; os.dup2({code_write}, 3)\n{_GUARD}", *words,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(environment),
            start_new_session=True, pass_fds=(code_write,),
        )  # fmt: skip
    except BaseException:
        os.close(code_read)
        raise
    finally:
        os.close(code_write)
    assert process.stdout is not None
    assert process.stderr is not None
    readers = [asyncio.ensure_future(_read_end(stream)) for stream in (process.stdout, process.stderr)]
    ended = loop.create_future()  # not process.wait(), which also waits for what the program left behind
    loop.add_reader(code_read, lambda: None if ended.done() else ended.set_result(None))
    try:
        await ended
    finally:
        loop.remove_reader(code_read)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # the guard waits for it, so that its number is still its own
        told = os.read(code_read, 32)
        os.close(code_read)
        try:
            await _wait_in_spite([*readers, asyncio.ensure_future(process.wait())], timeout=_GRACE)
        finally:
            for reader in readers:
                reader.cancel()
            process._transport.close()  # type: ignore[attr-defined]  # pipes that an escaped process still holds
    ends = [b"" if reader.cancelled() or not reader.done() else reader.result() for reader in readers]
    return int(told or -signal.SIGKILL), ends[0], ends[1]


async def _wait_in_spite(awaited: Sequence[asyncio.Future[Any]], timeout: float) -> None:
    """Wait for all, also where the task is cancelled meanwhile, which raises afterwards: they have been killed."""
    waiting = asyncio.ensure_future(asyncio.wait(awaited, timeout=timeout))
    cancelled: asyncio.CancelledError | None = None
    while not waiting.done():
        try:
            await asyncio.shield(waiting)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


async def _read_end(stream: asyncio.StreamReader) -> bytes:
    kept = b""
    while part := await stream.read(_KEPT):
        kept = (kept + part)[-_KEPT:]
    return kept


def _read_outcome(code: int, stdout: bytes, stderr: bytes) -> Outcome:
    said = stdout.decode("utf-8", "replace").strip()
    complaint = stderr.decode("utf-8", "replace").strip()
    if not said and code in (0, 1) and (code == 0 or not complaint):
        return Outcome(1.0 - code)
    end = f"; its stderr ends with: {complaint[-_SHOWN:]}" if complaint else ""
    if code != 0:
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        raise CommandError(f"it {how}{end}")
    last = said.splitlines()[-1]
    try:
        found = json.loads(last)
    except (ValueError, RecursionError):
        found = last
    if isinstance(found, dict) and "reward" in found and not found.keys() - {"reward", "metrics", "stop_reason"}:
        metrics = found.get("metrics", {})
        if isinstance(metrics, dict):
            return Outcome(found["reward"], stop_reason=found.get("stop_reason", "completed"), metrics=metrics)
    if found is None or (isinstance(found, (int, float)) and not isinstance(found, bool)):
        return Outcome(found)
    raise CommandError(
        f"its last line on stdout is {last[:200]!r}: expected its reward, a JSON number or an object with 'reward' and "
        f"perhaps 'metrics' and 'stop_reason'{end}"
    )


def _to_json(value: Any) -> Any:
    """NumPy's values as Python's."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} is no JSON value")
