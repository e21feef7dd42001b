"""Environments that are programs: ``environment="command: python my_agent.py"`` starts one process for each episode.

The program gets the episode's OpenAI-compatible endpoint and the data row in environment variables:

=================== =================================================================
``OPENAI_BASE_URL`` URL of the episode's endpoint, which ``openai.OpenAI()`` reads
``OPENAI_API_KEY``  key of the endpoint
``RLOX_ROW_FILE``   path of a file with the row as one JSON object
``RLOX_SEED``       ``chat.seed``, for the program's random numbers
=================== =================================================================

The reward is the last line of stdout: a JSON number, null (unscored), or an object with ``reward`` and optional
``metrics`` and ``stop_reason``. Without output on stdout, the exit code decides: 0 is a reward of 1.0, and 1 is a
reward of 0.0 if stderr is empty too. Any other result is an error of the environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlox_grpo.environments import Outcome
from rlox_grpo.errors import ConfigError
from rlox_grpo.rollout.episodes.chat import Chat

PREFIX = "command:"
"""Prefix of an ``environment`` that is a command."""

MAX_COMMANDS = 32
"""Maximum number of programs at the same time if ``max_live_episodes`` is not set."""

_TAIL_BYTES = 64 * 1024
"""Number of bytes at the end of stdout and of stderr that are stored."""
_SHOWN = 1000
"""Number of last characters of stderr in an error message."""
_GRACE = 5.0
"""Seconds to wait for the streams of a killed program, because a process that it started may keep them open."""

# Parent process of the program. It kills the process group when its stdin is closed, which happens when the trainer
# dies, because only the trainer has the other end.
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
    """A program failed, or wrote no reward."""


def read_command(environment: str) -> list[str]:
    """Split a command into its words.

    Raises:
        ConfigError: there is no command, a quote is not closed, or the program is not found.
    """
    try:
        words = shlex.split(environment.removeprefix(PREFIX))
    except ValueError as error:
        raise ConfigError(f"environment={environment!r} cannot be split into words: {error}") from None
    if not words:
        raise ConfigError(f"environment={environment!r} names no program: expected 'command: python my_agent.py'")
    if words[0] in ("python", "python3"):  # the trainer's interpreter, which has the packages of the agent
        words[0] = sys.executable
    if shutil.which(words[0]) is None:
        raise ConfigError(f"environment={environment!r}: the program {words[0]!r} is not found")
    return words


def name_command(words: Sequence[str]) -> str:
    """Return the environment's name in metrics: the program, or the script or module that Python runs."""
    named = [word for word in words[1:] if not word.startswith("-")] if words[0] == sys.executable else words[:1]
    return Path(named[0]).stem if named else "command"


async def play_command(words: Sequence[str], row: Mapping[str, Any], chat: Chat) -> Outcome:
    """Run a program for one episode. At its end, or if the task is cancelled, all processes of the program are killed.

    Raises:
        CommandError: the program failed, or its last line is not a reward.
    """
    try:
        text = json.dumps(dict(row), default=_to_json)
    except (TypeError, ValueError) as error:
        raise CommandError(f"the row cannot be written as JSON: {error}") from error
    with tempfile.TemporaryDirectory(prefix="rlox_episode_") as folder:
        path = Path(folder) / "row.json"
        path.write_text(text)
        variables = {"OPENAI_BASE_URL": chat.base_url, "OPENAI_API_KEY": chat.api_key}
        variables |= {"RLOX_ROW_FILE": str(path), "RLOX_SEED": str(chat.seed)}
        code, stdout, stderr = await _run(words, {**os.environ, **variables})
    return _read_outcome(code, stdout, stderr)


async def _run(words: Sequence[str], environment: Mapping[str, str]) -> tuple[int, bytes, bytes]:
    """Return the exit code, and the last bytes of stdout and stderr."""
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
    ends = [bytearray(), bytearray()]
    streams = (process.stdout, process.stderr)
    readers = [asyncio.ensure_future(_read_end(*each)) for each in zip(streams, ends, strict=True)]
    ended = loop.create_future()  # not process.wait(), which also waits for processes that the program left running
    loop.add_reader(code_read, lambda: None if ended.done() else ended.set_result(None))
    try:
        await ended
    finally:
        loop.remove_reader(code_read)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # the guard still runs, so its process id is not reused
        exit_code = os.read(code_read, 32)
        os.close(code_read)
        try:
            await _wait_in_spite([*readers, asyncio.ensure_future(process.wait())], timeout=_GRACE)
        finally:
            for reader in readers:
                reader.cancel()
            process._transport.close()  # type: ignore[attr-defined]  # an escaped process may hold the pipes
    return int(exit_code or -signal.SIGKILL), bytes(ends[0]), bytes(ends[1])


async def _wait_in_spite(awaited: Sequence[asyncio.Future[Any]], timeout: float) -> None:
    """Wait for all, even if the task is cancelled meanwhile. In that case, raise CancelledError at the end."""
    waiting = asyncio.ensure_future(asyncio.wait(awaited, timeout=timeout))
    cancelled: asyncio.CancelledError | None = None
    while not waiting.done():
        try:
            await asyncio.shield(waiting)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


async def _read_end(stream: asyncio.StreamReader, end: bytearray) -> None:
    """Keep the last bytes of ``stream`` in ``end``, which holds them even if the stream is never closed."""
    while chunk := await stream.read(_TAIL_BYTES):
        end += chunk
        del end[:-_TAIL_BYTES]


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
        result = json.loads(last)
    except (ValueError, RecursionError):
        result = last
    if isinstance(result, dict) and "reward" in result and not result.keys() - {"reward", "metrics", "stop_reason"}:
        metrics = result.get("metrics", {})
        if isinstance(metrics, dict):
            return Outcome(result["reward"], stop_reason=result.get("stop_reason", "completed"), metrics=metrics)
    if result is None or (isinstance(result, (int, float)) and not isinstance(result, bool)):
        return Outcome(result)
    raise CommandError(
        f"its last line on stdout is {last[:200]!r}: expected its reward, a JSON number or an object with 'reward' and "
        f"perhaps 'metrics' and 'stop_reason'{end}"
    )


def _to_json(value: Any) -> Any:
    """Convert NumPy values to Python values."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} is no JSON value")
