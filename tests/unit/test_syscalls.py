"""The seccomp filters of both architectures, carried out here: what each call gets, by the kernel's own numbers."""

from __future__ import annotations

import os
import platform
import signal
import socket
import struct
import subprocess
import sys

import pytest
from kernel_calls import KERNEL

from rlox_grpo.sandbox.confine import find_missing
from rlox_grpo.sandbox.syscalls import CHECKED, NUMBERS, make_filter

ALLOW, REFUSE, NO_SUCH_CALL, KILL = 0x7FFF0000, 0x50001, 0x50026, 0x80000000
"""SECCOMP_RET_ALLOW; SECCOMP_RET_ERRNO with EPERM, and with ENOSYS; SECCOMP_RET_KILL_PROCESS (linux/seccomp.h)."""

AUDIT_ARCH = {"x86_64": 62 | 0xC0000000, "aarch64": 183 | 0xC0000000, "i386": 3 | 0x40000000, "arm": 40 | 0x40000000}
"""The machine's number in elf.h, with the bits for 64 bits and for little-endian (linux/audit.h)."""

_ALWAYS = """
    read write readv writev pread64 pwrite64 preadv pwritev close close_range lseek
    stat fstat lstat newfstatat statx access faccessat faccessat2 readlink readlinkat getcwd chdir fchdir
    getdents getdents64 mkdir mkdirat rmdir unlink unlinkat rename renameat renameat2 symlink symlinkat link linkat
    dup dup2 dup3 pipe pipe2 flock umask fsync fdatasync ftruncate
    poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait eventfd2
    timerfd_create timerfd_settime timerfd_gettime
    recvfrom shutdown getsockopt getsockname getpeername
    mmap munmap mprotect mremap madvise brk membarrier rseq set_robust_list get_robust_list futex
    sched_yield sched_getaffinity gettid getpid getppid getuid geteuid getgid getegid getgroups getresuid getresgid
    getpgid getpgrp getsid getrusage times clock_gettime clock_getres clock_nanosleep nanosleep gettimeofday time
    getcpu getitimer setitimer alarm rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack rt_sigpending
    rt_sigsuspend rt_sigtimedwait pause restart_syscall exit exit_group wait4 waitid uname sysinfo getrandom getrlimit
"""
ALWAYS = frozenset(_ALWAYS.split())
"""Calls that every program may make, on an architecture that has them."""

Steps = list[tuple[int, int, int, int]]


def make_steps(machine: str) -> Steps:
    return list(struct.iter_unpack("=HBBI", make_filter(machine, 1234)))


def decide(steps: Steps, arch: int, number: int, *arguments: int) -> int:
    """What a filter answers to a call: its instructions, carried out as in the kernel's net/core/filter.c."""
    data = struct.pack("=IIQ6Q", number, arch, 0, *(value % 2**64 for value in [*arguments, *[0] * 6][:6]))
    at = held = 0
    while True:
        code, if_true, if_false, operand = steps[at]
        at += 1
        if code == 0x20:  # BPF_LD | BPF_W | BPF_ABS
            (held,) = struct.unpack_from("=I", data, operand)
        elif code == 0x54:  # BPF_ALU | BPF_AND | BPF_K
            held &= operand
        elif code == 0x15:  # BPF_JMP | BPF_JEQ | BPF_K
            at += if_true if held == operand else if_false
        else:
            assert code == 0x06, hex(code)  # BPF_RET | BPF_K
            return operand


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_each_call_of_the_kernel_is_allowed_or_refused_by_its_own_number(machine: str) -> None:
    names = KERNEL[machine]
    expected = {number: ALLOW if name in ALWAYS else REFUSE for number, name in names.items() if name not in CHECKED}
    steps, arch = make_steps(machine), AUDIT_ARCH[machine]
    for arguments in ((), (-1,) * 6):
        found = {number: decide(steps, arch, number, *arguments) for number in expected}
        wrong = {names[number]: hex(answer) for number, answer in found.items() if answer != expected[number]}
        assert wrong == {}


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_a_number_that_is_no_call_is_refused(machine: str) -> None:
    """Those of later kernels, and on x86 those of x32: the same numbers with bit 30 set."""
    later = set(range(1024)) - set(KERNEL[machine])
    assert len(later) > 600
    steps, arch = make_steps(machine), AUDIT_ARCH[machine]
    for number in [*later, *(0x40000000 + number for number in range(1024)), 0x80000000, 0xFFFFFFFF]:
        assert decide(steps, arch, number) == REFUSE, number


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("other", [*AUDIT_ARCH.values(), 0])
def test_a_call_by_another_architecture_kills(machine: str, other: int) -> None:
    steps = make_steps(machine)
    answers = {decide(steps, other, number) for number in range(1024)}
    assert (answers == {KILL}) == (other != AUDIT_ARCH[machine])


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_decides_by_arguments(machine: str) -> None:
    truncate, write = os.O_TRUNC, os.O_WRONLY | os.O_CREAT
    cases = [
        (ALLOW, "openat", (-100, 0, os.O_RDONLY)),
        (ALLOW, "openat", (-100, 0, write | truncate)),
        (REFUSE, "openat", (-100, 0, truncate)),  # Landlock does not see this before its third version
        (REFUSE, "openat", (-100, 0, truncate | os.O_CREAT)),
        (ALLOW, "kill", (1234, 15)),
        (REFUSE, "kill", (-1234, 15)),
        (REFUSE, "kill", (0, 15)),
        (REFUSE, "kill", (1234, 9)),  # the sign of a kill from outside
        (ALLOW, "tgkill", (1234, 1234, 6)),
        (REFUSE, "tgkill", (1235, 1235, 6)),
        (REFUSE, "tgkill", (1234, 1234, 9)),
        (ALLOW, "socketpair", (socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)),
        (REFUSE, "socketpair", (socket.AF_UNIX, socket.SOCK_DGRAM)),
        (REFUSE, "socketpair", (socket.AF_UNIX, socket.SOCK_SEQPACKET)),
        (REFUSE, "socketpair", (socket.AF_INET, socket.SOCK_STREAM)),
        (ALLOW, "sendto", (3, 0, 1, 0, 0, 0)),
        (REFUSE, "sendto", (3, 0, 1, 0, 1 << 40, 16)),
        (REFUSE, "sendto", (3, 0, 1, 0, 1, 16)),
        (ALLOW, "prlimit64", (0, 7, 0, 1 << 40)),
        (REFUSE, "prlimit64", (1, 7, 0, 0)),
        (REFUSE, "prlimit64", (0, 7, 1 << 40, 0)),
        (ALLOW, "fcntl", (3, 1)),
        (REFUSE, "fcntl", (3, 8)),
        (ALLOW, "ioctl", (3, 0x5413)),
        (REFUSE, "ioctl", (3, 0x5412)),
        (ALLOW, "prctl", (15,)),
        (REFUSE, "prctl", (1, 0)),
        (NO_SUCH_CALL, "clone3", ()),  # the C library then tries clone, which is refused
    ]
    if machine == "x86_64":
        cases += [(ALLOW, "open", (0, write | truncate)), (REFUSE, "open", (0, truncate))]
    numbers = {name: number for number, name in KERNEL[machine].items()}
    steps, arch = make_steps(machine), AUDIT_ARCH[machine]
    for answer, name, arguments in cases:
        assert decide(steps, arch, numbers[name], *arguments) == answer, (name, arguments)
    assert {name for _, name, _ in cases} == {name for name in CHECKED if name in numbers}


@pytest.mark.skipif(find_missing() is not None, reason=f"this system cannot confine: {find_missing()}")
def test_the_kernel_takes_the_filter_of_another_architecture_and_kills_by_it() -> None:
    (other,) = set(NUMBERS) - {platform.machine()}
    code = (
        "import ctypes, os, struct\n"
        "from rlox_grpo.sandbox.syscalls import make_filter\n"
        f"steps = make_filter({other!r}, os.getpid())\n"
        "held = ctypes.create_string_buffer(steps, len(steps))\n"
        "program = struct.pack('@HP', len(steps) // 8, ctypes.addressof(held))\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "assert libc.prctl(38, 1, 0, 0, 0) == 0\n"
        "print('ready', flush=True)\n"
        "libc.prctl(22, 2, program, 0, 0)\n"
        "print('refused by the kernel, or not killed', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGSYS, "ready\n"), done.stderr
