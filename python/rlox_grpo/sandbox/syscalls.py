"""The system calls that a confined process may make, and the seccomp filter that allows no other.

The filter is a list of what is allowed, so a call that a later kernel adds is refused. The filter refuses new processes
and threads, sockets except for a private pair, messages with descriptors (``sendmsg``), programs (``execve``), modes
and owners of files, limits, and every call that names another process. Numbers: Linux's ``unistd.h`` of each
architecture; the filter's format: linux/filter.h.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Mapping


def _read_table(text: str) -> Mapping[str, int]:
    return {name: int(number) for name, number in (entry.split(":") for entry in text.split())}


NUMBERS: Mapping[str, Mapping[str, int]] = {
    "x86_64": _read_table(
        """
    read:0 write:1 readv:19 writev:20 pread64:17 pwrite64:18 preadv:295 pwritev:296 close:3 close_range:436
    lseek:8 stat:4 fstat:5 lstat:6 newfstatat:262 statx:332 access:21 faccessat:269 faccessat2:439
    readlink:89 readlinkat:267 getcwd:79 chdir:80 fchdir:81 getdents:78 getdents64:217 mkdir:83 mkdirat:258
    rmdir:84 unlink:87 unlinkat:263 rename:82 renameat:264 renameat2:316 symlink:88 symlinkat:266 link:86
    linkat:265 dup:32 dup2:33 dup3:292 pipe:22 pipe2:293 flock:73 umask:95 fsync:74 fdatasync:75
    ftruncate:77 poll:7 ppoll:271 select:23 pselect6:270 epoll_create:213 epoll_create1:291 epoll_ctl:233
    epoll_wait:232 epoll_pwait:281 eventfd2:290 timerfd_create:283 timerfd_settime:286 timerfd_gettime:287
    recvfrom:45 shutdown:48 getsockopt:55 getsockname:51 getpeername:52 mmap:9
    munmap:11 mprotect:10 mremap:25 madvise:28 brk:12 membarrier:324 rseq:334 set_robust_list:273
    get_robust_list:274 futex:202 sched_yield:24 sched_getaffinity:204 gettid:186 getpid:39 getppid:110
    getuid:102 geteuid:107 getgid:104 getegid:108 getgroups:115 getresuid:118 getresgid:120 getpgid:121
    getpgrp:111 getsid:124 getrusage:98 times:100 clock_gettime:228 clock_getres:229 clock_nanosleep:230
    nanosleep:35 gettimeofday:96 time:201 getcpu:309 getitimer:36 setitimer:38 alarm:37 rt_sigaction:13
    rt_sigprocmask:14 rt_sigreturn:15 sigaltstack:131 rt_sigpending:127 rt_sigsuspend:130
    rt_sigtimedwait:128 pause:34 restart_syscall:219 exit:60 exit_group:231 wait4:61 waitid:247 uname:63
    sysinfo:99 getrandom:318 getrlimit:97 open:2 openat:257 fcntl:72 ioctl:16 socketpair:53 sendto:44
    kill:62 tgkill:234 prctl:157 prlimit64:302 clone3:435
        """
    ),
    "aarch64": _read_table(
        """
    read:63 write:64 readv:65 writev:66 pread64:67 pwrite64:68 preadv:69 pwritev:70 close:57 close_range:436
    lseek:62 fstat:80 newfstatat:79 statx:291 faccessat:48 faccessat2:439 readlinkat:78 getcwd:17 chdir:49
    fchdir:50 getdents64:61 mkdirat:34 unlinkat:35 renameat:38 renameat2:276 symlinkat:36 linkat:37 dup:23
    dup3:24 pipe2:59 flock:32 umask:166 fsync:82 fdatasync:83 ftruncate:46 ppoll:73 pselect6:72
    epoll_create1:20 epoll_ctl:21 epoll_pwait:22 eventfd2:19 timerfd_create:85 timerfd_settime:86
    timerfd_gettime:87 recvfrom:207 shutdown:210 getsockopt:209 getsockname:204
    getpeername:205 mmap:222 munmap:215 mprotect:226 mremap:216 madvise:233 brk:214 membarrier:283 rseq:293
    set_robust_list:99 get_robust_list:100 futex:98 sched_yield:124 sched_getaffinity:123 gettid:178
    getpid:172 getppid:173 getuid:174 geteuid:175 getgid:176 getegid:177 getgroups:158 getresuid:148
    getresgid:150 getpgid:155 getsid:156 getrusage:165 times:153 clock_gettime:113 clock_getres:114
    clock_nanosleep:115 nanosleep:101 gettimeofday:169 getcpu:168 getitimer:102 setitimer:103
    rt_sigaction:134 rt_sigprocmask:135 rt_sigreturn:139 sigaltstack:132 rt_sigpending:136 rt_sigsuspend:133
    rt_sigtimedwait:137 restart_syscall:128 exit:93 exit_group:94 wait4:260 waitid:95 uname:160 sysinfo:179
    getrandom:278 getrlimit:163 openat:56 fcntl:25 ioctl:29 socketpair:199 sendto:206 kill:129 tgkill:131
    prctl:167 prlimit64:261 clone3:435
        """
    ),
}
"""Numbers of the calls that are allowed always, or by their arguments (:data:`CHECKED`), by architecture."""

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000
_REFUSE = _ERRNO | errno.EPERM
_KILL_PROCESS = 0x80000000

_LOAD, _EQUAL, _MASK, _RETURN = 0x20, 0x15, 0x54, 0x06
_ARCH, _NUMBER, _ARGUMENTS = 4, 0, 16

_O_TRUNC, _O_ACCMODE = 0o1000, 0o3
_FCNTL = (0, 1, 2, 3, 4, 5, 6, 7, 1030)
"""F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, the three locks, F_DUPFD_CLOEXEC: none names a process to signal."""
_IOCTL = (0x5401, 0x5413, 0x5421, 0x5450, 0x5451, 0x541B)
"""TCGETS, TIOCGWINSZ, FIONBIO, FIONCLEX, FIOCLEX, FIONREAD."""
_PRCTL = (15, 16)
"""PR_SET_NAME, PR_GET_NAME."""
_SIGKILL = 9
_AF_UNIX, _SOCK_STREAM, _SOCK_TYPE_MASK = 1, 1, 0xF

_Step = tuple[int, int, int, int]
"""Code, jump if true, jump if false, operand."""


def make_filter(machine: str, pid: int) -> bytes:
    """Return the filter of a process, as ``struct sock_filter`` entries.

    Args:
        machine: a key of :data:`NUMBERS`.
        pid: the id of the process, the only one that it may signal.
    """
    numbers = NUMBERS[machine]
    steps: list[_Step] = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, _AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER),
    ]
    checks = _make_checks(pid)
    # For each call: if the number differs, jump over the body, which returns in every case.
    for name, number in numbers.items():
        body = [*checks.get(name, ()), (_RETURN, 0, 0, _ALLOW)]
        steps += [(_EQUAL, 0, len(body), number), *body]
    steps.append((_RETURN, 0, 0, _REFUSE))
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def _make_checks(pid: int) -> Mapping[str, list[_Step]]:
    """The steps that refuse a call because of its arguments."""
    is_self = _require(_low(0), pid)
    return {
        # O_RDONLY with O_TRUNC shortens a file that is only read: Landlock sees that from its third version on.
        "open": _forbid(_low(1), _O_TRUNC, mask=_O_TRUNC | _O_ACCMODE),
        "openat": _forbid(_low(2), _O_TRUNC, mask=_O_TRUNC | _O_ACCMODE),
        "fcntl": _require(_low(1), *_FCNTL),
        "ioctl": _require(_low(1), *_IOCTL),
        "socketpair": [*_require(_low(0), _AF_UNIX), *_require(_low(1), _SOCK_STREAM, mask=_SOCK_TYPE_MASK)],
        "sendto": [*_require(_low(4), 0), *_require(_high(4), 0)],  # no address
        # Not by SIGKILL, with which the kernel ends a program that was never judged where memory has run out.
        "kill": [*is_self, *_forbid(_low(1), _SIGKILL)],
        "tgkill": [*is_self, *_forbid(_low(2), _SIGKILL)],
        "prctl": _require(_low(0), *_PRCTL),
        "prlimit64": [*_require(_low(0), 0), *_require(_low(2), 0), *_require(_high(2), 0)],  # its own, to read
        "clone3": [(_RETURN, 0, 0, _ERRNO | errno.ENOSYS)],
    }


def _require(offset: int, *values: int, mask: int = 0xFFFFFFFF) -> list[_Step]:
    """Refuse the call unless the word at a place, under a mask, is one of the values."""
    # A value that is equal jumps over the others and the refusal.
    tests = [(_EQUAL, len(values) - at, 0, value) for at, value in enumerate(values)]
    return [(_LOAD, 0, 0, offset), (_MASK, 0, 0, mask), *tests, (_RETURN, 0, 0, _REFUSE)]


def _forbid(offset: int, value: int, mask: int = 0xFFFFFFFF) -> list[_Step]:
    """Refuse the call if the word at a place, under a mask, is the value."""
    return [(_LOAD, 0, 0, offset), (_MASK, 0, 0, mask), (_EQUAL, 0, 1, value), (_RETURN, 0, 0, _REFUSE)]


def _low(argument: int) -> int:
    """The place of an argument's lower 32 bits; both architectures are little-endian."""
    return _ARGUMENTS + 8 * argument


def _high(argument: int) -> int:
    return _low(argument) + 4


CHECKED = tuple(_make_checks(0))
"""Calls whose arguments decide."""
