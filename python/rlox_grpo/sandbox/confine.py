"""Confine the calling process: Landlock for files, seccomp for everything else, and resource limits.

Each step is final: a process cannot undo it. Structures: linux/landlock.h, linux/seccomp.h, linux/capability.h.
"""

from __future__ import annotations

import ctypes
import os
import platform
import stat
import struct
import sys
from collections.abc import Iterable
from pathlib import Path

from rlox_grpo.sandbox.results import Limits
from rlox_grpo.sandbox.syscalls import NUMBERS, make_filter

_LANDLOCK_CREATE, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT = 444, 445, 446
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_SIGKILL = 9
_CAPABILITY_VERSION_3 = 0x20080522
_OPEN_FILES = 32

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _REMOVE_DIR, _REMOVE_FILE = (1 << bit for bit in range(6))
_MAKE_DIR, _MAKE_REG, _MAKE_SYM, _REFER, _TRUNCATE = 1 << 7, 1 << 8, 1 << 12, 1 << 13, 1 << 14
_RIGHTS_BY_VERSION = (0, 13, 14, 15, 15, 16)
"""How many of the file rights each version of Landlock knows; later versions know the last."""

READ = _READ_FILE | _READ_DIR
WRITE_FILE = _READ_FILE | _WRITE_FILE
PRIVATE_FOLDER = (
    READ | _WRITE_FILE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_REG | _MAKE_SYM | _REFER | _TRUNCATE
)
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE


class ConfinementError(RuntimeError):
    """The system lacks what confinement needs; the message names it and says what to do."""


def find_missing() -> str | None:
    """Return what this system lacks to confine a process, and what to do about it; None if it lacks nothing."""
    if not sys.platform.startswith("linux"):
        return f"it needs Linux (Landlock and seccomp), this is {sys.platform}: run it in a Linux container or machine"
    if platform.machine() not in NUMBERS or sys.maxsize < 2**32 or sys.byteorder != "little":
        return f"it knows the system calls of {' and '.join(NUMBERS)}, this is {platform.machine()}"
    version = _landlock_version()
    if version < 1:
        return (
            "Landlock is missing (Linux 5.13 with CONFIG_SECURITY_LANDLOCK): add landlock to the kernel's lsm= list; "
            "in a container, let its seccomp profile allow landlock_create_ruleset, landlock_add_rule and "
            "landlock_restrict_self (those of Docker since 20.10.11 do)"
        )
    actions = Path("/proc/sys/kernel/seccomp/actions_avail")
    if actions.exists() and "errno" not in actions.read_text().split():
        return "seccomp filters are missing (CONFIG_SECCOMP_FILTER): use a kernel that has them"
    if not hasattr(os, "pidfd_open"):
        return "os.pidfd_open is missing (Linux 5.3, Python on glibc 2.31): use a newer Python build"
    return None


def make_ruleset(paths: Iterable[tuple[str, int]]) -> int:
    """Create a Landlock ruleset that allows no rights but those of each path, beneath it; return its descriptor.

    ``paths`` are pairs of path and rights. A path that is gone is left out.
    """
    version = _landlock_version()
    handled = (1 << _RIGHTS_BY_VERSION[min(version, 5)]) - 1
    # From version 4: TCP bind and connect. From version 6: abstract sockets and signals to processes outside.
    fields = (handled, 0b11 if version >= 4 else 0, 0b11 if version >= 6 else 0)
    attributes = struct.pack("=QQQ", *fields)[: 24 if version >= 6 else 16 if version >= 4 else 8]
    ruleset = _call("landlock_create_ruleset", _LANDLOCK_CREATE, attributes, ctypes.c_size_t(len(attributes)), 0)
    for path, rights in paths:
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
                rights &= _FILE_RIGHTS
            rule = struct.pack("=Qi", rights & handled, descriptor)
            _call(f"landlock_add_rule for {path}", _LANDLOCK_ADD_RULE, ruleset, 1, rule, 0)
        finally:
            os.close(descriptor)
    return ruleset


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends."""
    _prctl("PR_SET_PDEATHSIG", _PR_SET_PDEATHSIG, _SIGKILL)


def confine(rulesets: Iterable[int], limits: Limits) -> None:
    """Confine this process for the rest of its life. Open descriptors stay open.

    Raises:
        ConfinementError: a step was refused; the process must not continue.
    """
    _set_limits(limits)
    _drop_capabilities()
    _prctl("PR_SET_NO_NEW_PRIVS", _PR_SET_NO_NEW_PRIVS, 1)
    for ruleset in rulesets:
        _call("landlock_restrict_self", _LANDLOCK_RESTRICT, ruleset, 0)
        os.close(ruleset)
    steps = make_filter(platform.machine(), os.getpid())
    held = ctypes.create_string_buffer(steps, len(steps))
    program = struct.pack("@HP", len(steps) // 8, ctypes.addressof(held))
    _prctl("seccomp", _PR_SET_SECCOMP, 2, program)


def _set_limits(limits: Limits) -> None:
    import resource

    bounds = {
        # SIGXCPU alone: at a hard limit the kernel kills as it does where memory has run out. The server ends a
        # process that goes on.
        resource.RLIMIT_CPU: (limits.cpu_seconds, resource.RLIM_INFINITY),
        resource.RLIMIT_AS: (limits.memory_mb << 20,) * 2,
        resource.RLIMIT_FSIZE: (limits.files_mb << 20,) * 2,
        resource.RLIMIT_NOFILE: (_OPEN_FILES,) * 2,
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_MEMLOCK: (0, 0),
        resource.RLIMIT_MSGQUEUE: (0, 0),
    }
    for bound, (soft, hard) in bounds.items():
        try:
            _, inherited = resource.getrlimit(bound)
            finite = [value for value in (hard, inherited) if value != resource.RLIM_INFINITY]
            resource.setrlimit(bound, (min([soft, *finite]), min(finite, default=resource.RLIM_INFINITY)))
        except (OSError, ValueError) as error:
            raise ConfinementError(f"setrlimit({bound}, {hard}) was refused: {error}") from error


def _drop_capabilities() -> None:
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    if _libc().capset(header, bytes(24)) != 0:
        raise ConfinementError(f"capset was refused: {os.strerror(ctypes.get_errno())}")


def _landlock_version() -> int:
    return int(_libc().syscall(ctypes.c_long(_LANDLOCK_CREATE), None, ctypes.c_size_t(0), 1))


def _call(name: str, number: int, *arguments: object) -> int:
    converted = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    result = int(_libc().syscall(ctypes.c_long(number), *converted))
    if result < 0:
        raise ConfinementError(f"{name} was refused: {os.strerror(ctypes.get_errno())}")
    return result


def _prctl(name: str, option: int, *arguments: int | bytes) -> None:
    converted = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in arguments]
    converted += [ctypes.c_ulong(0)] * (4 - len(converted))
    if _libc().prctl(option, *converted) != 0:
        raise ConfinementError(f"prctl({name}) was refused: {os.strerror(ctypes.get_errno())}")


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    return libc
