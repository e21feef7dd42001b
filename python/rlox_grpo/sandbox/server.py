"""The process that starts confined processes: a small interpreter that forks one for each program.

The server runs no foreign code and reads neither programs nor tests: a job passes descriptors, which the confined
processes read. A forked process therefore has nothing of another program in its memory. The server ends with the
process that started it, and the kernel then ends the confined processes.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import gc
import json
import os
import selectors
import shutil
import signal
import socket
import stat
import sys
import sysconfig
import time
from dataclasses import dataclass, field
from typing import Any, NoReturn

from rlox_grpo.sandbox import guest
from rlox_grpo.sandbox.confine import (
    PRIVATE_FOLDER,
    READ,
    WRITE_FILE,
    ConfinementError,
    confine,
    die_with_parent,
    find_missing,
    make_ruleset,
)
from rlox_grpo.sandbox.results import Limits

LONGEST_JOB = 1 << 16
MOST_DESCRIPTORS = 16
_LOOK = 0.05
"""Seconds between two looks at the size of a temporary folder."""
_LOOK_AT_PARENT = 1.0
"""Seconds between two looks at whether the trainer lives: a fork of it may hold the socket open."""
_CONFINED = b"confined"
_PRELOADED = (
    *("bisect", "collections", "copy", "dataclasses", "datetime", "decimal", "enum", "fractions", "functools", "heapq"),
    *("itertools", "json", "math", "operator", "random", "re", "statistics", "string", "typing"),
)
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")


@dataclass(eq=False)
class Process:
    """One confined process of a job. ``inherited`` are the device and inode of the files that it began with."""

    pid: int
    pidfd: int
    folder: str
    report: int
    inherited: frozenset[tuple[int, int]]
    done: dict[str, Any] | None = None
    killed: bool = False


@dataclass(eq=False)
class Job:
    """Processes that run together; when the last of them ends, or a limit is passed, all are ended."""

    number: int
    limits: Limits
    start: float = field(default_factory=time.monotonic)
    processes: list[Process] = field(default_factory=list)
    ended: str = "exit"
    failed: str | None = None

    @property
    def deadline(self) -> float:
        """The time on the monotonic clock at which the job exceeds its limit of elapsed time."""
        return self.start + self.limits.wall_seconds


def main() -> None:
    """Serve jobs from descriptor 0 until it closes."""
    control = socket.socket(fileno=os.dup(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        if (missing := find_missing()) is not None:
            raise ConfinementError(missing)
        Server(control, sys.argv[1]).serve()
    except ConfinementError as error:
        control.send(json.dumps({"missing": str(error)}).encode())


class Server:
    """Starts, watches and ends the processes of jobs."""

    def __init__(self, control: socket.socket, work: str) -> None:
        self._control, self._work = control, work
        for name in _PRELOADED:
            __import__(name)
        standard = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
        libraries = _list_libraries(standard)
        # A ruleset of exact files, which all processes share. A second ruleset of each process allows its own folder.
        exact = [(path, READ) for folder in standard for path in _list_library(folder)]
        exact += [(path, READ) for path in libraries]
        exact += (devices := [(path, WRITE_FILE if path == os.devnull else READ) for path in _DEVICES])
        self._shared = make_ruleset([*exact, (work, PRIVATE_FOLDER)])
        broad = standard | {os.path.dirname(path) for path in libraries}
        # Whole folders are fewer rules, but a folder above the programs' folders would allow each of them the others'.
        is_above = any(f"{os.path.realpath(work)}/".startswith(f"{os.path.realpath(path)}/") for path in broad)
        self._broad = exact if is_above else [*((path, READ) for path in broad), *devices]
        self._jobs: list[Job] = []
        self._selector = selectors.DefaultSelector()
        gc.collect()
        gc.freeze()

    def serve(self) -> None:
        """Serve until the control socket closes or the trainer is gone; then end everything."""
        trainer = os.getppid()
        self._control.send(json.dumps({"ready": True}).encode())
        with self._selector:
            self._selector.register(self._control, selectors.EVENT_READ)
            try:
                while os.getppid() == trainer:
                    for key, _ in self._selector.select(self._find_pause()):
                        if key.data is not None:
                            self._reap(*key.data)
                        elif not self._take():
                            return
                    for job in self._jobs:
                        _check(job)
            finally:
                for job in self._jobs:
                    for process in job.processes:
                        if process.done is None:
                            _kill(process)
                            os.waitpid(process.pid, 0)
                _remove(self._work)  # here too, as the trainer may have been killed

    def _find_pause(self) -> float:
        if not self._jobs:
            return _LOOK_AT_PARENT
        return max(0.0, min(_LOOK, min(job.deadline for job in self._jobs) - time.monotonic()))

    def _take(self) -> bool:
        """Receive a job and start it; False at the end of the socket."""
        size = array.array("i").itemsize
        try:
            message, ancillary, _, _ = self._control.recvmsg(LONGEST_JOB, socket.CMSG_SPACE(MOST_DESCRIPTORS * size))
        except OSError:
            return False
        if not message:
            return False
        descriptors = array.array("i")
        for _, _, content in ancillary:
            descriptors.frombytes(content[: len(content) - len(content) % size])
        asked = json.loads(message)
        job = Job(asked["number"], Limits(**asked["limits"]))
        try:
            for index, role in enumerate(asked["roles"]):  # four descriptors for each process
                self._start(job, role, list(descriptors[4 * index : 4 * index + 4]))
        except OSError as error:
            job.failed = f"a process could not be started: {error}"
            for process in job.processes:
                _kill(process)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self._jobs.append(job)
        if not job.processes:
            self._answer(job)
        return True

    def _start(self, job: Job, role: str, descriptors: list[int]) -> None:
        folder = os.path.join(self._work, os.urandom(16).hex())
        os.mkdir(folder, 0o700)
        reading, writing = os.pipe()
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become(role, descriptors, job.limits, folder, writing, server)
        os.close(writing)
        inherited = frozenset((status.st_dev, status.st_ino) for status in map(os.fstat, descriptors))
        process = Process(pid, os.pidfd_open(pid), folder, reading, inherited)
        job.processes.append(process)
        self._selector.register(process.pidfd, selectors.EVENT_READ, (job, process))

    def _become(
        self, role: str, descriptors: list[int], limits: Limits, folder: str, report: int, server: int
    ) -> NoReturn:
        """Confine this new process and run its role. Never returns."""
        try:
            die_with_parent()
            if os.getppid() != server:
                os._exit(1)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            # Where the machine has no memory left, the kernel takes this process before the trainer and the server.
            with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
                score.write("1000")
            private = make_ruleset([*self._broad, (folder, PRIVATE_FOLDER)])
            _keep_only(
                {
                    **{3 + index: source for index, source in enumerate(descriptors)},
                    7: report,
                    8: self._shared,
                    9: private,
                }
            )
            os.chdir(folder)
            os.environ.clear()
            os.environ.update({"HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "TZ": "UTC"})
            confine((8, 9), limits)
            os.write(7, _CONFINED)
            os.close(7)
        except BaseException as error:  # noqa: BLE001  a process that is not confined runs nothing
            with contextlib.suppress(OSError):
                os.write(7, f"{type(error).__name__}: {error}".encode()[:2000])
            os._exit(1)
        guest.act(role)

    def _reap(self, job: Job, process: Process) -> None:
        self._selector.unregister(process.pidfd)
        _, status, usage = os.wait4(process.pid, 0)
        os.close(process.pidfd)
        report = os.read(process.report, 4096)
        os.close(process.report)
        _remove(process.folder)
        process.done = {
            "code": os.waitstatus_to_exitcode(status),
            "cpu_seconds": usage.ru_utime + usage.ru_stime,
            "killed": process.killed,
            "confined": report == _CONFINED,
            "report": report.decode("utf-8", "replace"),
        }
        if process is job.processes[-1]:
            for other in job.processes:
                _kill(other)
        if all(other.done is not None for other in job.processes):
            self._answer(job)

    def _answer(self, job: Job) -> None:
        self._jobs.remove(job)
        answer = {
            "number": job.number,
            "ended": job.ended,
            "failed": job.failed,
            "seconds": time.monotonic() - job.start,
            "processes": [process.done for process in job.processes],
        }
        self._control.send(json.dumps(answer).encode())


def _check(job: Job) -> None:
    """End a job that is out of time or processor time, or whose folders are too large."""
    if job.ended != "exit":
        return
    room = job.limits.files_mb << 20
    if time.monotonic() >= job.deadline:
        job.ended = "wall"
    elif any(p.done is None and _measure(p, room) > room for p in job.processes):
        job.ended = "files"
    elif any(p.done is None and _measure_time(p) >= job.limits.cpu_seconds + 1 for p in job.processes):
        job.ended = "cpu"  # it ignores, catches or blocks the SIGXCPU of a second before
    if job.ended != "exit":
        for process in job.processes:
            _kill(process)


def _keep_only(sources: dict[int, int]) -> None:
    """Put descriptors in their places, give 0 to 2 to nothing, and close every other."""
    # By way of high numbers, because a source may have the number of another place.
    high = {number: os.dup2(source, 100 + number) for number, source in sources.items()}
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    for number, source in high.items():
        os.dup2(source, number)
    os.closerange(max(sources) + 1, os.sysconf("SC_OPEN_MAX"))


def _kill(process: Process) -> None:
    """Kill a process; ``killed`` stays False for one that has ended, or that the kernel is ending already.

    The kernel closes the sockets of a process that something else killed some time before it has ended.
    """
    if process.done is None and not _is_ending(process.pid):
        process.killed = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def _is_ending(pid: int) -> bool:
    """Whether a process that is not reaped yet has begun to end: PF_EXITING (linux/sched.h), the third flag bit."""
    return bool(int(_read_stat(pid)[6]) & 4)


def _measure_time(process: Process) -> float:
    """Processor time of a process that is not reaped yet, in seconds."""
    user, system = _read_stat(process.pid)[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _read_stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third on (proc(5)), after the name, which may hold anything."""
    with open(f"/proc/{pid}/stat") as stat_file:
        return stat_file.read().rpartition(")")[2].split()


def _measure(process: Process, enough: int) -> int:
    """Bytes in a process's folder, and in files that it removed and holds open or mapped; stops at ``enough``.

    The output of the process is not counted: each output file has a limit of its own. A removed file that is mapped and
    not open counts as ``enough``, the largest size of a file, because nothing shows its size. A folder that cannot be
    listed counts as more than ``enough``, because it can hold any number of files: its path is too long, or its mode
    lets a program write there and not read.
    """
    total = 0
    opened: set[int] = set()
    waiting = [process.folder]
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{process.pid}/fd"):
            with contextlib.suppress(OSError):
                status = os.stat(f"/proc/{process.pid}/fd/{name}")
                removed = stat.S_ISREG(status.st_mode) and status.st_nlink == 0
                if removed and (status.st_dev, status.st_ino) not in process.inherited:
                    total += status.st_blocks * 512
                    opened.add(status.st_ino)
    total += enough * len(_list_mapped(process) - opened)
    while waiting and total <= enough:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):  # the program has removed it; others are counted
                        total += 4096 + entry.stat(follow_symlinks=False).st_blocks * 512
                        if entry.is_dir(follow_symlinks=False):
                            waiting.append(entry.path)
                    if total > enough:
                        break
        except OSError as error:
            if error.errno in (errno.ENAMETOOLONG, errno.EACCES):
                return enough + 1
    return total


def _list_mapped(process: Process) -> set[int]:
    """Inodes of the files of a process's folder that it has removed and still maps (/proc/PID/maps in proc(5))."""
    inodes: set[int] = set()
    with contextlib.suppress(OSError), open(f"/proc/{process.pid}/maps", "rb") as maps:
        for line in maps:
            if line.endswith(b" (deleted)\n") and os.path.basename(process.folder).encode() in line:
                inodes.add(int(line.split(maxsplit=5)[4]))
    return inodes


def _remove(folder: str) -> None:
    """Remove a folder with whatever a program left in it, however deep.

    The content of each folder below moves up before it is removed, so that no path grows long.
    """
    waiting = [folder]
    while waiting:
        current = waiting.pop()
        with contextlib.suppress(OSError):
            os.chmod(current, 0o700)
        with contextlib.suppress(OSError), os.scandir(current) as entries:
            for entry in list(entries):
                with contextlib.suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        os.chmod(entry.path, 0o700)
                        moved = os.path.join(folder, os.urandom(16).hex())
                        os.rename(entry.path, moved)
                        waiting.append(moved)
                    else:
                        os.unlink(entry.path)
        if current != folder:
            with contextlib.suppress(OSError):
                os.rmdir(current)
    shutil.rmtree(folder, ignore_errors=True)


def _list_library(folder: str) -> list[str]:
    """The entries of a standard library's folder, without the folders of installed packages."""
    return [
        os.path.join(folder, name)
        for name in os.listdir(folder)
        if name not in ("site-packages", "dist-packages", "test", "ensurepip", "idlelib")
    ]


def _list_libraries(standard: set[str]) -> set[str]:
    """The shared libraries that the interpreter and the standard library's modules need.

    A process of its own loads every extension module and reads its own map: loading them all leaves no trace here.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            os.close(reading)
            for folder in standard:
                dynamic = os.path.join(folder, "lib-dynload")
                for name in os.listdir(dynamic) if os.path.isdir(dynamic) else ():
                    if "test" not in name and "tkinter" not in name:
                        with contextlib.suppress(OSError):
                            ctypes.CDLL(os.path.join(dynamic, name))
            with open("/proc/self/maps") as maps, os.fdopen(writing, "w") as out:
                out.writelines(f"{line.split(maxsplit=5)[5].strip()}\n" for line in maps if ".so" in line)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as listing:
        paths = {line.strip() for line in listing}
    os.waitpid(pid, 0)
    return {path for path in paths if path.startswith("/") and os.path.isfile(path)}
