"""Attack the sandbox: each attempt is contained, and what runs beside it is untouched."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from rlox_grpo.environments import Reply, ToolCall
from rlox_grpo.rollout.episodes.tools import ToolLimits, Tools
from rlox_grpo.sandbox import Limits, SandboxError, ScriptResult, get_sandbox, python_tool
from rlox_grpo.sandbox import client as sandbox_client
from rlox_grpo.sandbox.client import Sandbox
from rlox_grpo.sandbox.confine import find_missing
from rlox_grpo.sandbox.syscalls import NUMBERS

MISSING = find_missing()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=f"this system cannot confine: {MISSING}")

QUICK = Limits(cpu_seconds=1, wall_seconds=300.0)  # on a busy machine a second of processor time takes long
"""For programs that end themselves, or by their processor time: the clock ends none of them."""


def run(code: str, stdin: str = "", limits: Limits = QUICK) -> ScriptResult:
    return get_sandbox().submit_script(textwrap.dedent(code), stdin, limits).result()


def attempt(action: str, setup: str = "") -> str:
    """What became of a statement: ``done``, or the name of the error that refused it."""
    body = textwrap.indent(textwrap.dedent(action).strip(), "    ")
    code = f"import os, sys\n{textwrap.dedent(setup)}\ntry:\n{body}\nexcept BaseException as error:\n"
    result = run(code + "    print(type(error).__name__)\nelse:\n    print('done')\n")
    assert result.ended == "exit", result
    return result.stdout.strip() or result.stderr


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret.txt"
    path.write_text("the user's own")
    path.chmod(0o666)
    return path


def test_a_program_runs_with_its_input_and_the_standard_library() -> None:
    code = """
    import sys, sqlite3, hashlib, decimal, lzma, asyncio, tempfile, ctypes, zoneinfo, unittest, email.message
    with tempfile.TemporaryDirectory() as folder, open(folder + "/a", "w") as out:
        out.write("kept")
    async def double(x):
        await asyncio.sleep(0)
        return 2 * x
    print(asyncio.run(double(int(input()))), sqlite3.connect(":memory:").execute("select 3").fetchone())
    print("warned", file=sys.stderr)
    sys.exit(3)
    """
    result = run(code, "21\n")
    assert (result.ended, result.code, result.stderr) == ("exit", 3, "warned\n"), result
    assert result.stdout == "42 (3,)\n"


@pytest.mark.parametrize(
    "action",
    [
        "os.fork()",
        "os.forkpty()",
        "os.posix_spawn('/bin/true', ['true'], {})",
        "os.execv('/bin/true', ['true'])",
        "__import__('subprocess').run(['/bin/true'])",
        "__import__('multiprocessing').get_context('fork').Process(target=print).start()",
        "__import__('threading').Thread(target=print).start()",
        "os.system('true') == 0 or os.abort_is_not_called",
        "os.setuid(65534)",
        "os.setgid(65534)",
        "os.chroot('.')",
        "os.nice(-1)",
        "os.memfd_create('hidden')",
        "os.mkfifo('pipe')",
        "os.mknod('device')",
        "__import__('resource').setrlimit(7, (64, 64))",
        "__import__('resource').prlimit(os.getppid(), 7)",
        "os.sched_setaffinity(0, {0})",
    ],
)
def test_no_process_no_program_no_other_identity(action: str) -> None:
    assert attempt(action) in ("PermissionError", "BlockingIOError", "RuntimeError", "ValueError", "AttributeError")


def test_a_fork_bomb_of_any_kind_has_one_process() -> None:
    result = run(
        """
        import ctypes, os, platform
        libc = ctypes.CDLL(None, use_errno=True)
        clone, fork, vfork = {"x86_64": (56, 57, 58), "aarch64": (220, -1, -1)}[platform.machine()]
        found = set()
        for _ in range(1000):
            for number in (clone, fork, vfork, 435):
                if number >= 0:
                    found.add(libc.syscall(number, 17, 0, 0, 0, 0))
            try:
                os.fork()
            except PermissionError:
                continue
        print(found)
        """
    )
    assert result.stdout == "{-1}\n", result


def test_seccomp_refuses_every_other_call() -> None:
    """Each would fail otherwise than by EPERM where it reached the kernel, or do harm.

    But for uretprobe and uprobe of x86: the kernel ends who calls them by SIGILL and asks no filter.
    """
    allowed = set(NUMBERS[platform.machine()].values())
    numbers = [*sorted(set(range(700)) - allowed - {335, 336}), 0x40000000 + 39]
    result = run(
        f"""
        import ctypes, errno
        libc = ctypes.CDLL(None, use_errno=True)
        for number in {numbers}:
            ctypes.set_errno(0)
            if libc.syscall(number, *[ctypes.c_long(-1)] * 6) != -1 or ctypes.get_errno() != errno.EPERM:
                print(number, ctypes.get_errno())
        print("end")
        """
    )
    assert result.stdout == "end\n", result


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the 32-bit entry is x86's")
def test_the_32_bit_entry_kills() -> None:
    result = run(
        r"""
        import ctypes, mmap
        page = mmap.mmap(-1, 4096, prot=7)
        page.write(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")  # mov eax, 20 (getpid); int 0x80; ret
        ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
        print("alive")
        """
    )
    assert (result.code, result.stdout) in ((-signal.SIGSYS, ""), (-signal.SIGSEGV, "")), result


@pytest.mark.parametrize(
    "action",
    [
        "socket.socket()",
        "socket.create_connection(('127.0.0.1', PORT), 1)",
        "socket.socket(socket.AF_UNIX).connect('\\0rlox')",
        "socket.socket(socket.AF_UNIX).bind('own')",
        "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
        "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
        "socket.socketpair()[0].sendto(b'x', ABSTRACT)",
        "socket.socketpair()[0].sendmsg([b'x'], [], 0, ABSTRACT)",
        "socket.getaddrinfo('localhost', 80)",
    ],
)
def test_no_network_no_loopback_no_unix_socket(action: str) -> None:
    with socket.socket() as server, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as unix:
        server.bind(("127.0.0.1", 0))
        server.listen()
        unix.bind(f"\0rlox-{os.getpid()}")
        unix.listen()
        setup = f"import socket\nPORT = {server.getsockname()[1]}\nABSTRACT = chr(0) + 'rlox-{os.getpid()}'"
        assert attempt(action, setup) in ("PermissionError", "OSError", "gaierror")


@pytest.mark.parametrize(
    "action",
    [
        "os.kill(os.getppid(), 0)",
        "os.kill(os.getppid(), 9)",
        "os.kill(-1, 9)",
        "os.kill(0, 9)",
        pytest.param(f"os.kill({os.getpid()}, 15)", id="os.kill(the tests, 15)"),
        "os.killpg(0, 9)",
        "__import__('fcntl').fcntl(0, 8, os.getppid())",
        "__import__('fcntl').fcntl(0, 10, 9)",
        "__import__('fcntl').ioctl(0, 0x8901, os.getppid())",
        "__import__('fcntl').ioctl(0, 0x5412, b'x')",
        "os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
        "os.pidfd_open(os.getppid())",
    ],
)
def test_no_signal_and_no_word_to_another_process(action: str) -> None:
    assert attempt(action) == "PermissionError"


def test_a_program_may_end_itself_by_a_signal() -> None:
    assert run("import os; os.kill(os.getpid(), 15)").code == -signal.SIGTERM
    assert run("import os; os.abort()").code == -signal.SIGABRT


@pytest.mark.parametrize(
    "path", ["/proc", "/proc/self/environ", "/proc/self/mem", "/proc/1/cmdline", "/sys", "/", "/etc", "/home", "/dev"]
)
def test_nothing_of_the_system_can_be_listed_or_read(path: str) -> None:
    what = f"os.listdir({path!r})" if os.path.isdir(path) else f"open({path!r}, 'rb').read(1)"
    assert attempt(what) == ("PermissionError" if os.path.exists(path) else "FileNotFoundError")


def test_neither_the_parent_nor_its_packages_can_be_read() -> None:
    for path in (f"/proc/{os.getpid()}/environ", f"/proc/{os.getpid()}/maps", __file__, sandbox_client.__file__):
        assert attempt(f"open({path!r}, 'rb').read(1)") == "PermissionError", path
    assert attempt(f"os.listdir({os.path.dirname(pytest.__file__)!r})") == "PermissionError"
    assert attempt("import numpy") == "ModuleNotFoundError"
    assert attempt("import rlox_grpo.rewards") == "ModuleNotFoundError"
    assert attempt("import pip, setuptools") == "ModuleNotFoundError"


@pytest.mark.parametrize(
    "action",
    [
        "open(SECRET).read()",
        "open(SECRET, 'w')",
        "open(SECRET, 'a')",
        "os.open(SECRET, os.O_RDONLY | os.O_TRUNC)",
        "os.truncate(SECRET, 0)",
        "os.remove(SECRET)",
        "os.rename(SECRET, 'own')",
        "os.link(SECRET, 'own')",
        "os.chmod(SECRET, 0)",
        "os.utime(SECRET)",
        "os.symlink(SECRET, 'to'); open('to').read()",
        "os.symlink(SECRET, 'to'); open('to', 'w')",
        "os.symlink(os.path.dirname(SECRET), 'to'); os.listdir('to')",
        "open('own', 'w').close(); os.rename('own', SECRET + '2')",
        "open('own', 'w').close(); os.link('own', SECRET + '2')",
        "os.listdir(os.path.dirname(SECRET))",
        "os.mkdir(os.path.dirname(SECRET) + '/new')",
        "open(os.path.dirname(SECRET) + '/new', 'w')",
        "os.listdir('..')",
        "open('../beside', 'w')",
        "os.chdir(os.path.dirname(SECRET)); open('secret.txt')",
        "open(os.open(SECRET, os.O_PATH)).read()",
        "os.open('.', os.O_TMPFILE | os.O_RDWR); os.open(os.path.dirname(SECRET), os.O_TMPFILE | os.O_RDWR)",
    ],
)
def test_files_of_the_user_are_neither_read_nor_changed(action: str, secret: Path) -> None:
    before = os.stat(secret)
    assert attempt(action, f"SECRET = {str(secret)!r}") in ("PermissionError", "OSError")
    assert secret.read_text() == "the user's own"
    assert os.listdir(secret.parent) == ["secret.txt"]
    assert (os.stat(secret).st_mode, os.stat(secret).st_mtime_ns) == (before.st_mode, before.st_mtime_ns)


def test_the_standard_library_is_read_only() -> None:
    assert attempt("open(os.__file__, 'a')") == "PermissionError"
    assert attempt("os.open(os.__file__, os.O_RDONLY | os.O_TRUNC)") == "PermissionError"
    assert attempt("os.chmod(os.__file__, 0)") == "PermissionError"


def test_no_environment_and_no_descriptor_comes_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLOX_SECRET", "token")
    result = run(
        """
        import json, os
        open_ones = []
        for number in range(4096):
            try:
                os.fstat(number)
                open_ones.append(number)
            except OSError:
                pass
        print(json.dumps([sorted(os.environ), open_ones, os.listdir(".")]))
        """
    )
    assert json.loads(result.stdout) == [["HOME", "LANG", "TMPDIR", "TZ"], [0, 1, 2], []]


@pytest.mark.parametrize(
    "code",
    [
        "x = bytearray(10**10)",
        "x = []\nwhile True: x.append(bytearray(1 << 20))",
        "x = 'a'\nwhile True: x += x",
        "import mmap\nx = mmap.mmap(-1, 1 << 40)",
        "x = 1 << 10**13",
    ],
)
def test_memory_is_bounded(code: str) -> None:
    result = run(code)
    assert result.code != 0, result
    assert (result.ended == "memory") == ("MemoryError" in result.stderr), result
    assert "MemoryError" in result.stderr or "OSError" in result.stderr or "OverflowError" in result.stderr, result


@pytest.mark.parametrize(
    "code",
    [
        "for i in range(10**6): open(f'f{i}', 'wb').write(b'x' * (4 << 20))",
        "for i in range(10**9): open(f'f{i}', 'wb').close()",
        "for i in range(10**9): os.mkdir(f'd{i}')",
        "for i in range(10**9): os.mkdir('d'); os.chdir('d')",
        "held = []\nfor i in range(9):\n  f = open('f', 'wb', 0); held += [f]; f.write(bytes(4 << 20))\n"
        "  os.remove('f')\n"
        "import time; time.sleep(60)",
        "os.mkdir('x', 0o300)\nfor i in range(9): open(f'x/f{i}', 'wb').write(bytes(4 << 20))\n"
        "import time; time.sleep(60)",  # written, and not read by its owner
        "import ctypes, time\nmap = ctypes.CDLL(None).mmap\nmap.restype = ctypes.c_void_p\n"
        "for i in range(4):\n  f = open('f', 'wb+', 0); f.write(bytes(4 << 20)); os.remove('f')\n"
        "  assert map(None, ctypes.c_size_t(4096), 1, 1, f.fileno(), ctypes.c_long(0)) > 0; f.close()\n"
        "time.sleep(60)",  # removed and closed, and held by one mapped page
    ],
)
def test_the_temporary_folder_is_bounded_and_removed(code: str) -> None:
    sandbox = get_sandbox()
    result = sandbox.submit_script(f"import os\n{code}", limits=Limits(cpu_seconds=100, wall_seconds=300.0)).result()
    assert result.ended == "files", result
    assert os.listdir(sandbox._work) == []


def test_no_file_is_held_by_a_message_that_nobody_reads() -> None:
    """Such a file is neither in the folder nor among the open files, so that its size would not count."""
    setup = "import array, socket\nends = socket.socketpair()\nopened = array.array('i', [os.open('f', os.O_CREAT)])"
    rights = "[(socket.SOL_SOCKET, socket.SCM_RIGHTS, opened)]"
    assert attempt(f"ends[0].sendmsg([b'x'], {rights})", setup) == "PermissionError"
    assert attempt("ends[0].send(b'x'); ends[1].recv(1)", setup) == "done"


def test_files_below_the_longest_path_are_bounded() -> None:
    """Levels of a chain are counted one by one only as far as a path reaches; on a tmpfs they take no blocks."""
    code = "import os, time\nfor i in range(3000): os.mkdir('d'); os.chdir('d')\ntime.sleep(60)"
    result = get_sandbox().submit_script(code, limits=Limits(cpu_seconds=100, files_mb=64, wall_seconds=300.0)).result()
    assert result.ended == "files", result
    assert os.listdir(get_sandbox()._work) == []


def test_one_file_is_bounded() -> None:
    result = run("f = open('f', 'wb', 0)\nwhile True: f.write(b'x' * (1 << 20))")
    assert "File too large" in result.stderr or result.code == -signal.SIGXFSZ, result


def test_folders_that_refuse_their_owner_are_removed() -> None:
    run("import os\nos.makedirs('a/b'); open('a/b/c', 'w').close(); os.symlink('/', 'a/link')\nos.mkdir('x', 0)")
    assert os.listdir(get_sandbox()._work) == []


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_output_is_bounded(stream: str) -> None:
    result = run(f"import sys\nwhile True: sys.{stream}.write('x' * 100000)")
    assert (result.ended, result.code) == ("exit", 1), result
    assert max(len(result.stdout), len(result.stderr)) <= 256 << 10
    assert result.cut == (stream == "stdout")


def test_full_outputs_take_nothing_from_the_temporary_folder() -> None:
    code = """
    import os, time
    for number in (1, 2):
        for _ in range(8):
            os.write(number, bytes(1 << 20))
    open("own", "wb").write(bytes(4 << 20))
    time.sleep(0.5)  # as long as ten looks at the folder
    """
    result = run(code)
    assert (result.ended, result.code) == ("exit", 0), result


def test_an_endless_loop_ends_by_its_processor_time_and_cannot_catch_it() -> None:
    for handler in ("signal.SIG_IGN", "lambda *_: signal.signal(signal.SIGXCPU, signal.SIG_DFL)"):
        result = run(f"import signal\nsignal.signal(signal.SIGXCPU, {handler})\nwhile True: pass")
        assert result.ended == "cpu", result


@pytest.mark.parametrize("how", ["os.kill(os.getpid(), 9)", "signal.pthread_kill(threading.get_ident(), 9)"])
def test_a_program_cannot_pretend_that_it_was_killed(how: str) -> None:
    """It would have no score in place of 0."""
    assert attempt(how, setup="import signal, threading") == "PermissionError"


def _kill_once_it_waits(busy_seconds: float) -> ScriptResult:
    """Kill a program from outside, as the kernel does where the machine has no memory left."""
    sandbox = get_sandbox()
    code = f"import time\nwhile time.process_time() < {busy_seconds}: pass\nopen('ready', 'w').close()\ntime.sleep(60)"
    before = set(_list_children(sandbox._server.pid))
    running = sandbox.submit_script(code, limits=Limits(cpu_seconds=2, wall_seconds=60.0))
    while not list(Path(sandbox._work).glob("*/ready")):
        time.sleep(0.01)
    (pid,) = set(_list_children(sandbox._server.pid)) - before
    os.kill(pid, signal.SIGKILL)
    return running.result()


def test_a_program_that_is_killed_within_its_limits_is_told_apart() -> None:
    result = _kill_once_it_waits(0.0)
    assert (result.ended, result.code) == ("killed", -signal.SIGKILL), result
    assert get_sandbox().submit_script("print(1)").result().stdout == "1\n"


def test_a_kill_late_in_its_processor_time_is_not_taken_for_that_limit() -> None:
    result = _kill_once_it_waits(1.3)
    assert (result.ended, result.cpu_seconds > 1) == ("killed", True), result


def _memory_group() -> Path | None:
    """A new control group that may bound memory; None where this process may not make one."""
    for folder, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(folder) / f"rlox_grpo_test_{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / limit).write_text(str(48 << 20))
        except OSError:
            group.rmdir()
            continue
        return group
    return None


def test_the_kernel_kills_a_program_where_memory_has_run_out_and_it_is_not_judged() -> None:
    group = _memory_group()
    if group is None:
        pytest.skip("this user may not make a control group with a memory limit")
    code = """
import os, time
x = []
open("ready", "w").close()
while not os.path.exists("go"): time.sleep(0.01)
for _ in range(150): x += [b"x" * (1 << 20)]
"""
    sandbox = get_sandbox()
    try:
        before = set(_list_children(sandbox._server.pid))
        running = sandbox.submit_script(code, limits=Limits(wall_seconds=60.0))
        while not (ready := list(Path(sandbox._work).glob("*/ready"))):
            time.sleep(0.01)
        (pid,) = set(_list_children(sandbox._server.pid)) - before
        (group / "cgroup.procs").write_text(str(pid))
        ready[0].with_name("go").touch()
        result = running.result()
    finally:
        group.rmdir()
    assert (result.ended, result.code) == ("killed", -signal.SIGKILL), result
    alone = code.replace('not os.path.exists("go")', "False")
    assert run(alone).ended == "exit"  # the same program where there is memory


def test_a_sleeper_ends_by_the_clock_and_the_others_do_not_wait() -> None:
    limits = Limits(wall_seconds=0.5)
    sandbox = get_sandbox()
    sleepers = [sandbox.submit_script("import time; print('in', flush=True); time.sleep(60)", limits=limits)]
    quick = sandbox.submit_script("print(1)")
    assert quick.result().stdout == "1\n"
    assert [(one.result().ended, one.result().stdout) for one in sleepers] == [("wall", "in\n")]


@pytest.mark.parametrize("temporary", [None, "/dev/shm"])
def test_two_programs_do_not_see_each_other(temporary: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where TMPDIR is a folder in memory, beneath the devices that every program may use."""
    if temporary is not None:
        if not os.access(temporary, os.W_OK):
            pytest.skip(f"this machine has no {temporary}")
        monkeypatch.setattr(tempfile, "tempdir", temporary)
    sandbox = Sandbox(2)  # on one core the shared one runs one program at a time
    monkeypatch.setitem(globals(), "get_sandbox", lambda: sandbox)
    waiting = sandbox.submit_script(
        "import os, time\nopen('own', 'w').write('mine')\nwhile not os.path.exists('end'): time.sleep(0.01)",
        limits=QUICK,
    )
    folder: list[Path] = []
    while not folder:
        assert not waiting.done(), waiting.result()
        folder = [path for path in Path(sandbox._work).iterdir() if (path / "own").exists()]
    for action in (f"open('{folder[0]}/own').read()", f"os.listdir('{folder[0]}')", f"open('{folder[0]}/new', 'w')"):
        assert attempt(action) == "PermissionError", action
    (folder[0] / "end").touch()
    assert waiting.result().ended == "exit"
    sandbox.close()


def test_programs_are_run_alike_each_time() -> None:
    code = "import random; print(random.random(), hash('text'), list({'a', 'b', 'c', 'd'}))"
    assert len({run(code).stdout for _ in range(4)}) == 1


def test_the_server_holds_nothing_of_a_program() -> None:
    """What it held would be in the memory of the next program, which is a copy of the server's."""
    sandbox = get_sandbox()
    marker = "a marker of program and tests".replace(" ", "_")
    passed = sandbox.submit_tests(f"def f(): return '{marker}'", [f"assert f() == '{marker}'"], QUICK).result()
    assert passed.passed == (True,)
    try:
        memory = open(f"/proc/{sandbox._server.pid}/mem", "rb")  # noqa: SIM115
    except PermissionError:
        pytest.skip("this system lets nobody read another process's memory")
    with memory, open(f"/proc/{sandbox._server.pid}/maps") as maps:
        for line in maps:
            area, rights, *_, name = line.split(maxsplit=5)
            if rights.startswith("rw") and not name.startswith("[v"):
                start, end = (int(place, 16) for place in area.split("-"))
                memory.seek(start)
                assert marker.encode() not in memory.read(end - start), line


def _wait_until_gone(pids: list[int]) -> list[int]:
    left = pids
    for _ in range(300):
        left = [
            pid for pid in left if Path(f"/proc/{pid}").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text()
        ]
        if not left:
            break
        time.sleep(0.05)
    return left


def _list_children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("killed", ["trainer", "trainer with a fork", "server"])
def test_nothing_is_left_when_the_trainer_or_the_server_is_killed(killed: str) -> None:
    code = (
        "from rlox_grpo.sandbox import *\n"
        "run = get_sandbox().submit_script('import time; time.sleep(600)', limits=Limits(wall_seconds=600.0))\n"
        "import os, time\n"
        f"fork = os.fork() if {killed == 'trainer with a fork'} else 0\n"
        f"if not fork and {killed == 'trainer with a fork'}: time.sleep(600)\n"
        "print(get_sandbox()._server.pid, fork, get_sandbox()._work, flush=True)\n"
        "try: run.result()\n"
        "except SandboxError as error: print('failed:', error, flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        *pids, folder = trainer.stdout.readline().split()
        server, fork = map(int, pids)
        while not (programs := _list_children(server)):
            time.sleep(0.02)
        os.kill(server if killed == "server" else trainer.pid, signal.SIGKILL)
        left = _wait_until_gone([server, *programs])
        if fork:
            os.kill(fork, signal.SIGKILL)
        assert left == []
        if killed == "server":
            assert trainer.stdout.readline().startswith("failed: the sandbox failed: its server process ended")
            trainer.wait()
    assert not os.path.exists(folder)


def test_a_dead_server_is_an_error_and_the_next_sandbox_works() -> None:
    sandbox = get_sandbox()
    running = sandbox.submit_script("import time; time.sleep(60)")
    sandbox._server.kill()
    with pytest.raises(SandboxError, match="the sandbox failed"):
        running.result()
    while sandbox._dead is None:
        time.sleep(0.01)
    assert run("print(2)").stdout == "2\n"


def test_a_system_that_cannot_confine_is_refused_at_construction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_client, "find_missing", lambda: "Landlock is missing: add it")
    with pytest.raises(SandboxError, match=r"cannot be confined on this system, so it is not run: Landlock is missing"):
        sandbox_client.Sandbox()


def test_a_probe_that_gets_out_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_client, "_PROBE", "import json; print(json.dumps(['open a socket']))")
    with pytest.raises(SandboxError, match="a first program could open a socket"):
        sandbox_client.Sandbox()


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"cpu_seconds": 0}, "cpu_seconds is 0"),
        ({"cpu_seconds": 1.5}, "cpu_seconds is 1.5"),
        ({"memory_mb": 8}, "memory_mb is 8"),
        ({"wall_seconds": 0.0}, "wall_seconds is 0.0"),
        ({"wall_seconds": float("nan")}, "wall_seconds is nan"),
    ],
)
def test_limits_are_checked(limits: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Limits(**limits)  # type: ignore[arg-type]


def test_many_threads_share_it() -> None:
    found: dict[int, str] = {}

    def work(number: int) -> None:
        found[number] = run(f"print({number})").stdout

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: f"{number}\n" for number in range(8)}


def test_of_512_programs_each_ends_by_its_own_limit_and_nothing_is_left() -> None:
    late = {
        0: ("import time; time.sleep(600)", Limits(wall_seconds=0.3), "wall"),
        1: ("while True: pass", QUICK, "cpu"),
    }
    sandbox = get_sandbox()
    running, expected = [], []
    for number in range(512):
        code, limits, ended = late.get(number % 256, (f"print({number})", QUICK, "exit"))
        running.append(sandbox.submit_script(code, limits=limits))
        expected.append((ended, f"{number}\n" if ended == "exit" else ""))
    assert [(one.result().ended, one.result().stdout) for one in running] == expected
    assert _list_children(sandbox._server.pid) == []
    assert os.listdir(sandbox._work) == []


def test_the_tool_shows_what_a_program_printed_and_how_it_ended() -> None:
    python = python_tool(QUICK)

    async def call() -> list[str]:
        codes = ["print(6 * 7)", "1 / 0", "pass", "print('x' * 10**6)", "while True: pass", "import os; os._exit(4)"]
        return await asyncio.gather(*(python(code) for code in codes))

    product, failed, silent, long, endless, exited = asyncio.run(call())
    assert product == "42"
    assert failed.startswith("Traceback")
    assert failed.endswith("ZeroDivisionError: division by zero")
    assert silent == "[the program printed nothing]"
    assert re.fullmatch(r"x+\n\[… 73\d{4} bytes cut …\]\nx+", long)
    assert endless == "[the program was ended: no processor time left]"
    assert exited == "[the program ended with exit code 4]"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_the_traceback_behind_long_output_reaches_the_policy(stream: str) -> None:
    code = f"import sys\nprint('begin', file=sys.{stream})\nprint('x' * 10**6, file=sys.{stream})\n1 / 0"
    call = ToolCall("python", {"code": code}, "0")
    none = np.empty(0, dtype=np.int64)
    reply = Reply("", "", None, (call,), "stop", none, none.astype(np.float32))
    (message,) = asyncio.run(Tools([python_tool(QUICK)], ToolLimits(max_chars=400)).answer(reply))
    text = message["content"]
    assert text.startswith("begin\nx")
    assert text.endswith("ZeroDivisionError: division by zero")
    assert "characters cut" in text
    assert len(text) < 450


def test_a_call_whose_caller_stops_waiting_leaves_the_sandbox_in_use() -> None:
    python = python_tool()

    async def call() -> str:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(python("import time; time.sleep(1)"), 0.3)
        return await asyncio.wait_for(python("import time; time.sleep(1.5); print(2)"), 60.0)

    assert asyncio.run(call()) == "2"  # after the answer for the first, which nobody waits for
    waited_for = get_sandbox().submit_script("print(3)")
    assert not waited_for.cancel()
    assert waited_for.result(60.0).stdout == "3\n"
