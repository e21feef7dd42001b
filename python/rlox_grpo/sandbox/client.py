"""Run programs in confined processes, several at once; and the tool ``python``, which runs those of the policy."""

from __future__ import annotations

import array
import asyncio
import contextlib
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlox_grpo.sandbox.confine import find_missing
from rlox_grpo.sandbox.results import Limits, SandboxError, ScriptResult, TestsResult, read_result

START_SECONDS = 60.0
_LIMIT_NAMES = {"cpu": "processor time", "wall": "time", "files": "room for files"}

_BOOT = (
    "import sys, types\n"
    "sys.path = [entry for entry in sys.path if entry]\n"
    "for name, folder in (('rlox_grpo', sys.argv[2]), ('rlox_grpo.sandbox', sys.argv[2] + '/sandbox')):\n"
    "    package = sys.modules[name] = types.ModuleType(name)\n"
    "    package.__path__ = [folder]\n"
    "from rlox_grpo.sandbox.server import main\n"
    "main()\n"
)
"""Loads the server without the package's own imports."""

_PROBE = """
import json, os, socket
broken = []
def attempt(name, action):
    try:
        action()
    except OSError:
        return
    broken.append(name)
attempt("read /etc/passwd", lambda: open("/etc/passwd").close())
attempt("list /", lambda: os.listdir("/"))
attempt("list /proc", lambda: os.listdir("/proc"))
attempt("write beside its folder", lambda: open("../beside", "w").close())
attempt("open a socket", socket.socket)
attempt("signal its parent", lambda: os.kill(os.getppid(), 0))
attempt("start a program", lambda: os.execv("/bin/sh", ["sh", "-c", "exit 3"]))
attempt("start a process", lambda: os.fork() or os._exit(0))
with open("own", "w") as own:
    own.write("kept")
import hashlib, sqlite3, unicodedata
print(json.dumps(broken))
"""


@dataclass(frozen=True)
class _Sent:
    """A job that was sent to the server, and the descriptors of its output."""

    future: Future[Any]
    limits: Limits
    outputs: tuple[int, ...]
    tests: int | None


class Sandbox:
    """Runs programs in confined processes, which a server process starts. Thread-safe.

    Args:
        workers: number of programs that run at the same time; by default the number of cores of this process, divided
            by the ranks of the machine (``LOCAL_WORLD_SIZE``).

    Raises:
        SandboxError: the sandbox does not work on this system; the message says what is missing and what to do.
    """

    def __init__(self, workers: int | None = None) -> None:
        missing = find_missing()
        if missing is not None:
            raise SandboxError(_refuse(missing))
        self._slots = threading.BoundedSemaphore(workers or count_workers())
        self._lock = threading.Lock()
        self._sent: dict[int, _Sent] = {}
        self._number = 0
        self._dead: str | None = None
        self._work = tempfile.mkdtemp(prefix="rlox_grpo_sandbox_")
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        python = getattr(sys, "_base_executable", None) or sys.executable
        with theirs:
            self._server = subprocess.Popen(
                [python, "-s", "-S", "-B", "-c", _BOOT, self._work, str(Path(__file__).parent.parent)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env={"PYTHONHASHSEED": "0", "LANG": "C.UTF-8", "TZ": "UTC", "PATH": os.defpath},
                cwd="/",
                start_new_session=True,
            )
        self._end = weakref.finalize(self, _end, self._control, self._server, self._work, os.getpid())
        try:
            self._wait_until_ready()
            threading.Thread(
                target=_read_answers, args=(weakref.ref(self), self._control), name="sandbox", daemon=True
            ).start()
            self._probe()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the server and all programs."""
        self._end()

    def submit_script(self, code: str, stdin: str = "", limits: Limits | None = None) -> Future[ScriptResult]:
        """Run a program as a script. The call blocks until a worker is free, but not until the program ends."""
        with contextlib.ExitStack() as opened:
            inputs = [_make_file(text, opened) for text in (code, stdin)]
            outputs = [os.memfd_create("output") for _ in range(2)]
            return self._submit([*inputs, *outputs], outputs, limits, None)

    def submit_tests(
        self, code: str, tests: Sequence[str], limits: Limits | None = None, objects: bool = False
    ) -> Future[TestsResult]:
        """Run test statements in one process and the program that they call in another.

        The call blocks as :meth:`submit_script` does. With ``objects``, tests can use objects of the program, not only
        its functions and plain data.
        """
        with contextlib.ExitStack() as opened:
            ends = [opened.enter_context(end) for end in socket.socketpair()]
            payloads = [
                _make_file(text, opened) for text in (code, json.dumps({"tests": list(tests), "objects": objects}))
            ]
            lost = [_make_file("", opened) for _ in range(2)]
            outputs = [os.memfd_create(name) for name in ("verdicts", "message")]
            descriptors = [payloads[0], ends[0].fileno(), *lost]
            descriptors += [payloads[1], ends[1].fileno(), *outputs]
            return self._submit(descriptors, outputs, limits, len(tests))

    def _submit(
        self, descriptors: list[int], outputs: list[int], limits: Limits | None, tests: int | None
    ) -> Future[Any]:
        limits = limits or Limits()
        self._slots.acquire()
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # so that a caller cannot cancel it: set_result would then fail
        with self._lock:
            self._number += 1
            number = self._number
            self._sent[number] = _Sent(future, limits, tuple(outputs), tests)
            roles = ["script"] if tests is None else ["program", "tests"]
            message = {"number": number, "roles": roles, "limits": asdict(limits)}
            try:
                if self._dead is not None:
                    raise OSError(self._dead)
                ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
                self._control.sendmsg([json.dumps(message).encode()], ancillary)
            except OSError as error:
                self._settle(number, {"failed": f"its server process cannot be reached: {error}"})
        return future

    def _settle(self, number: int, answer: dict[str, Any]) -> None:
        sent = self._sent.pop(number, None)
        if sent is None:
            return
        self._slots.release()
        try:
            sent.future.set_result(read_result(answer, sent.limits, sent.outputs, sent.tests))
        except Exception as error:  # noqa: BLE001  raised by whoever waits
            sent.future.set_exception(error)
        finally:
            for output in sent.outputs:
                os.close(output)

    def _die(self, why: str) -> None:
        self._dead = why
        for number in list(self._sent):
            self._settle(number, {"failed": why})

    def _wait_until_ready(self) -> None:
        readable, _, _ = select.select([self._control], [], [], START_SECONDS)
        message = self._control.recv(1 << 16) if readable else b""
        answer = json.loads(message) if message else {}
        if "missing" in answer:
            raise SandboxError(_refuse(answer["missing"]))
        if "ready" not in answer:
            self._server.kill()
            stderr = self._server.stderr.read() if self._server.stderr is not None else b""
            raise SandboxError(_refuse(f"its server process did not start: {stderr.decode(errors='replace')[-2000:]}"))

    def _probe(self) -> None:
        """Run a program that tries to break out. Raises SandboxError if an attempt succeeds or the program fails."""
        result = self.submit_script(_PROBE).result()
        if result.code != 0 or result.ended != "exit":
            ending = f"{result.ended}, code {result.code}: {result.stderr[-1000:]}"
            raise SandboxError(_refuse(f"a first program did not run ({ending})"))
        broken = json.loads(result.stdout)
        if broken:
            raise SandboxError(_refuse(f"a first program could {', '.join(broken)}"))


def count_workers() -> int:
    """Return the number of programs to run at the same time in this process."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // max(1, int(ranks) if ranks.isdigit() else 1))


_shared: dict[int, Sandbox] = {}
_shared_lock = threading.Lock()


def get_sandbox() -> Sandbox:
    """Return the sandbox of this process. A sandbox is started if there is none or if its server has died.

    Raises:
        SandboxError: the sandbox does not work on this system.
    """
    with _shared_lock:
        sandbox = _shared.get(os.getpid())
        if sandbox is None or sandbox._dead is not None:
            _shared.clear()
            sandbox = _shared[os.getpid()] = Sandbox()
        return sandbox


def python_tool(limits: Limits | None = None) -> Callable[[str], Awaitable[str]]:
    """Return the tool ``python`` for ``GRPO(tools=[…])``, which runs a program and returns its output.

    Calls share no variables and files. The result is stdout, then stderr, then a line about a limit, signal or exit
    code that ended the program, if any. Long output is cut in the middle, with a mark of how much was cut; the option
    ``max_observation_chars`` limits the length.

    Args:
        limits: limits of one call.

    Raises:
        SandboxError: the sandbox does not work on this system; the message says what is missing.
    """
    bounds = limits or Limits()
    get_sandbox()

    async def python(code: str) -> str:
        """Run a Python program and return what it prints. The program can use the standard library, but no network.

        Args:
            code: the program; print what you want to see.
        """
        running = await asyncio.to_thread(lambda: get_sandbox().submit_script(code, limits=bounds))
        return _show_result(await asyncio.wrap_future(running))

    return python


def _show_result(result: ScriptResult) -> str:
    lines = [result.stdout.rstrip("\n"), result.stderr.rstrip("\n")]
    if result.ended == "killed":
        lines.append("[the system killed the program, which had not reached its limits: run it again]")
    elif result.ended == "memory":
        lines.append("[the program had no memory left]")
    elif result.ended != "exit":
        lines.append(f"[the program was ended: no {_LIMIT_NAMES[result.ended]} left]")
    elif result.code < 0:
        lines.append(f"[the program was ended by signal {-result.code}]")
    elif result.code > 0 and not result.stderr:
        lines.append(f"[the program ended with exit code {result.code}]")
    return "\n".join(line for line in lines if line) or "[the program printed nothing]"


def _make_file(text: str, opened: contextlib.ExitStack) -> int:
    """Return the descriptor of an anonymous file with ``text``."""
    descriptor = os.memfd_create("given")
    opened.callback(os.close, descriptor)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(text.encode("utf-8", "replace"))
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _read_answers(owner: weakref.ref[Sandbox], control: socket.socket) -> None:
    """Settle futures until the socket closes.

    The thread has only a weak reference to the sandbox, so that an unused sandbox is deleted.
    """
    while True:
        try:
            message = control.recv(1 << 16)
        except OSError:
            message = b""
        sandbox = owner()
        if sandbox is None:
            return
        with sandbox._lock:
            if not message:
                sandbox._die("its server process ended")
                return
            answer = json.loads(message)
            sandbox._settle(answer["number"], answer)
        del sandbox


def _end(control: socket.socket, server: subprocess.Popen[bytes], work: str, owner: int) -> None:
    if os.getpid() != owner:  # a fork of the process that started it
        return
    with contextlib.suppress(OSError):
        control.shutdown(socket.SHUT_RDWR)
    try:
        server.wait(5.0)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
    if server.stderr is not None:
        server.stderr.close()
    control.close()
    shutil.rmtree(work, ignore_errors=True)


def _refuse(missing: str) -> str:
    return f"code that a model wrote cannot be confined on this system, so it is not run: {missing}"
