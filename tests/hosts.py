"""Hosts on one machine: network namespaces with a name, an address and a cable of their own. Linux, root, iproute2."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

CABLE = "veth0"
Made = TypeVar("Made")


@dataclass(frozen=True)
class Host:
    """A namespace; all hosts of a test know each other by name."""

    name: str
    address: str
    namespace: str

    def command(self, *words: object) -> list[str]:
        """``words`` as a command that runs there, under the host's name; the process started is the command itself."""
        inside = ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c"]
        return [*inside, f'hostname {self.name} && exec "$@"', "sh", *map(str, words)]

    def set_cable(self, state: str) -> None:
        """``up`` or ``down``."""
        _ip("-n", self.namespace, "link", "set", CABLE, state)

    def sent_bytes(self) -> int:
        """What has left it over the cable."""
        counters = subprocess.run(self.command("cat", "/proc/net/dev"), capture_output=True, text=True, check=True)
        (line,) = [line for line in counters.stdout.splitlines() if line.strip().startswith(f"{CABLE}:")]
        return int(line.split()[9])

    def processes(self) -> dict[int, str]:
        """Command lines of what runs there, by process."""
        pids = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True).stdout.split()
        lines = {}
        for pid in pids:
            with contextlib.suppress(OSError):  # it has ended since
                lines[int(pid)] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
        return lines

    def kill(self, pids: Sequence[int]) -> None:
        """End processes there."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def joined_hosts(count: int) -> Iterator[list[Host]]:
    """host0, host1, … with a cable each to one bridge; what runs there is killed and they are gone at the end.

    Raises:
        OSError: namespaces cannot be made here; says why.
    """
    missing = [program for program in ("ip", "unshare", "hostname") if shutil.which(program) is None]
    if missing or os.geteuid() != 0:
        raise OSError(f"hosts of a test need {missing[0]}" if missing else "hosts of a test need root")
    named = f"rlox-grpo-{os.getpid()}-{secrets.token_hex(2)}"
    hosts = [Host(f"host{place}", f"10.77.0.{place + 1}", f"{named}-{place}") for place in range(count)]
    names = "".join(f"{host.address} {host.name}\n" for host in hosts)
    bridge = f"{named}-bridge"
    try:
        _ip("netns", "add", bridge)
        _ip("-n", bridge, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", bridge, "link", "set", "bridge0", "up")
        for place, host in enumerate(hosts):
            _ip("netns", "add", host.namespace)
            files = _files(host)
            files.mkdir(parents=True)
            (files / "hosts").write_text(f"127.0.0.1 localhost\n{names}")  # /etc/hosts of what runs there
            end = f"to{place}"
            _ip("link", "add", CABLE, "netns", host.namespace, "type", "veth", "peer", "name", end, "netns", bridge)
            _ip("-n", bridge, "link", "set", end, "master", "bridge0", "up")
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", CABLE)
            _ip("-n", host.namespace, "link", "set", "lo", "up")
            host.set_cable("up")
        yield hosts
    finally:
        for host in hosts:
            host.kill(list(host.processes()))
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True)
            shutil.rmtree(_files(host), ignore_errors=True)
        subprocess.run(["ip", "netns", "del", bridge], capture_output=True)


def or_skip(made: contextlib.AbstractContextManager[Made]) -> Iterator[Made]:
    """A fixture's body: yield what ``made`` makes of hosts, or skip its tests where namespaces cannot be made."""
    try:
        with made as found:
            yield found
    except OSError as error:
        pytest.skip(str(error))


def _files(host: Host) -> Path:
    return Path("/etc/netns") / host.namespace


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")
