"""Limits of programs in the sandbox, and their results."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rlox_grpo.sandbox.guest import LONGEST_SHOWN, OUT_OF_MEMORY, PASSED, REFUSED

CUT_MARK = "\n[… {count} bytes cut …]\n"
"""Between the beginning and the end of an output."""

Ended = Literal["exit", "cpu", "wall", "files", "memory", "killed"]


class SandboxError(RuntimeError):
    """The sandbox does not work on this system, or has failed. Never the result of a program."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one program.

    Attributes:
        cpu_seconds: processor time, in whole seconds; one second more for a program that ignores or catches SIGXCPU.
        wall_seconds: elapsed time, in seconds. Should be larger than ``cpu_seconds``, so that a busy machine does not
            change a verdict.
        memory_mb: address space, in MiB.
        files_mb: size of the temporary folder, and of each output stream, in MiB.
        output_kb: number of KiB of each output stream that are returned.
    """

    cpu_seconds: int = 2
    wall_seconds: float = 10.0
    memory_mb: int = 256
    files_mb: int = 8
    output_kb: int = 256

    def __post_init__(self) -> None:
        for name, least in (("cpu_seconds", 1), ("memory_mb", 64), ("files_mb", 1), ("output_kb", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"{name} is {value!r}, expected a whole number of at least {least}")
        if not isinstance(self.wall_seconds, (int, float)) or not 0 < self.wall_seconds < 1e6:
            raise ValueError(f"wall_seconds is {self.wall_seconds!r}, expected a positive number of seconds")


@dataclass(frozen=True)
class ScriptResult:
    """The result of a script.

    Attributes:
        ended: ``exit``: the script ended itself, also by a signal; ``cpu``, ``wall``, ``files``: it exceeded this
            limit; ``memory``: it raised MemoryError at its limit; ``killed``: the system killed it within its limits,
            for example because the machine has no memory left.
        code: exit code, or the negative number of the signal.
        stdout, stderr: the output; if it is longer than ``output_kb``, its beginning and its end, with a mark of how
            much was cut between them.
        cut: whether stdout was longer than ``output_kb``.
        cpu_seconds, seconds: processor time and elapsed time.
    """

    ended: Ended
    code: int
    stdout: str
    stderr: str
    cut: bool
    cpu_seconds: float
    seconds: float


@dataclass(frozen=True)
class TestsResult:
    """The result of the tests of a program.

    Attributes:
        loaded: ``ok``; ``error``: the program raised an error or ended before its tests; ``unparseable``: syntax error.
        passed: one value for each test; False also for tests that did not run because of a limit or a kill.
        ended: as in :class:`ScriptResult`. ``memory``: a test or the program raised MemoryError. ``killed``: a process
            was killed within its limits before all tests had passed.
        refused: whether a test failed after an object of the program was refused.
        message: the error of the first failed test, or of the program before its tests; the program can write any text
            there.
    """

    __test__ = False

    loaded: Literal["ok", "error", "unparseable"]
    passed: tuple[bool, ...]
    ended: Ended
    refused: bool = False
    message: str = ""


def read_result(
    answer: dict[str, Any], limits: Limits, outputs: Sequence[int], tests: int | None
) -> ScriptResult | TestsResult:
    """Return the result of a job.

    Args:
        answer: answer of the server: how each process of the job ended.
        limits: limits of the job.
        outputs: file descriptors: standard output and error of a script, or the marks and the message of tests.
        tests: number of tests; None for a script.

    Raises:
        SandboxError: the server failed, or a process was not confined.
    """
    if answer.get("failed"):
        raise SandboxError(f"the sandbox failed: {answer['failed']}")
    for process in answer["processes"]:
        if not process["confined"] and process["code"] != -signal.SIGKILL:
            raise SandboxError(
                f"the sandbox failed: a process was not confined: {process['report'] or process['code']}"
            )
    last = answer["processes"][-1]
    ended: Ended = answer["ended"]
    if ended == "exit" and any(process["code"] == -signal.SIGXCPU for process in answer["processes"]):
        ended = "cpu"
    # SIGKILL, but not from the server, and no limit of the kernel's sends it: RLIMIT_CPU has no hard limit, and the
    # filter of system calls keeps the process from sending it to itself.
    if ended == "exit" and any(p["code"] == -signal.SIGKILL and not p["killed"] for p in answer["processes"]):
        ended = "killed"
    if ended == "exit" and any(process["code"] == OUT_OF_MEMORY for process in answer["processes"]):
        ended = "memory"
    most_bytes = limits.output_kb << 10
    if tests is not None:
        marks = os.pread(outputs[0], 1 + tests, 0).decode("ascii", "replace")
        loaded: Any = {"o": "ok", "s": "unparseable"}.get(marks[:1], "error")
        passed = tuple(marks[number : number + 1] == PASSED for number in range(1, tests + 1))
        # A process that is killed once every test has passed changes nothing.
        ended = "exit" if ended == "killed" and passed and all(passed) else ended
        message = os.pread(outputs[1], LONGEST_SHOWN, 0).decode("utf-8", "replace")
        return TestsResult(loaded, passed, ended, REFUSED in marks[1:], message)
    stdout, stderr = (_read_ends(output, most_bytes) for output in outputs)
    cut = os.fstat(outputs[0]).st_size > most_bytes
    code = 1 if ended == "memory" else last["code"]  # as the interpreter ends after MemoryError
    return ScriptResult(ended, code, stdout, stderr, cut, last["cpu_seconds"], answer["seconds"])


def _read_ends(output: int, most_bytes: int) -> str:
    """Return the text of a file; of a text longer than ``most_bytes`` bytes its beginning, a mark and its end."""
    size = os.fstat(output).st_size
    if size <= most_bytes:
        return os.pread(output, most_bytes, 0).decode("utf-8", "replace")
    half = (most_bytes - len(CUT_MARK) - 16) // 2
    head, tail = (os.pread(output, half, offset).decode("utf-8", "replace") for offset in (0, size - half))
    return head + CUT_MARK.format(count=size - 2 * half) + tail
