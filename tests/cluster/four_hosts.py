"""A Ray cluster over network namespaces of this machine by ``ray start``: a head without CPUs, and three nodes of 2."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tiny_run import RAY_NODE, environment

from hosts import Host, joined_hosts

PORT = 6379
STARTS = 4
RAY = (sys.executable, "-m", "ray.scripts.scripts")
# Named ports: else a node waits at most 15 s for its agent's Python to start, which a busy machine may not keep.
PORTS = [
    *("--dashboard-agent-listen-port=52365", "--dashboard-agent-grpc-port=52366"),
    *("--runtime-env-agent-port=52367", "--metrics-export-port=52368"),
]
# Ray's own: 3 s, 10 s and 5 times. A node that is cut off is dead after 3 (1 + 2) s here.
HEALTH = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}
# Ray writes a node's address into /tmp/ray, which therefore has to be each host's own.
OWN_FOLDER = 'mkdir -p "$0" /tmp/ray && mount --bind "$0" /tmp/ray && exec "$@"'


class Nodes:
    """The hosts of the cluster; ``hosts[0]`` is the head's."""

    def __init__(self, hosts: Sequence[Host], folder: Path) -> None:
        self.hosts, self._folder = hosts, folder
        self.address = f"{hosts[0].address}:{PORT}"

    def start(self, place: int) -> None:
        """Start Ray on a host; what ran there is killed."""
        host = self.hosts[place]
        role = ["--head", f"--port={PORT}", "--num-cpus=0"] if place == 0 else [f"--address={self.address}"]
        for _ in range(STARTS):
            host.set_cable("up")
            self.lose(place)
            words = [*RAY, "start", *role, f"--node-ip-address={host.address}", *PORTS, "--disable-usage-stats"]
            words += ["--include-log-monitor=false"]
            words += ["--include-dashboard=false", "--no-monitor"] if place == 0 else ["--num-cpus=2"]
            done = subprocess.run(
                self.command(place, *words, "--object-store-memory=104857600"),
                env=environment(**HEALTH, **RAY_NODE),
                capture_output=True,
                text=True,
            )
            if done.returncode == 0:
                return
        raise AssertionError(done.stdout + done.stderr)

    def command(self, place: int, *words: str) -> list[str]:
        """``words`` as a command that runs on a host."""
        return self.hosts[place].command("sh", "-c", OWN_FOLDER, self._folder / f"ray{place}", *words)

    def train(self, *arguments: str, file: str = "run.toml", place: int = 0, **changes: str) -> subprocess.Popen[str]:
        """Start ``rlox-grpo train FILE`` on a host, in the run's folder."""
        own = environment(**changes)
        words = [sys.executable, "-m", "rlox_grpo", "train", file, "--ray", self.address, *arguments]
        return subprocess.Popen(
            self.command(place, *words),
            cwd=self._folder,
            env={**own, "PYTHONPATH": os.pathsep.join([own.get("PYTHONPATH", ""), str(Path(__file__).parent)])},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def lose(self, place: int) -> None:
        """End every process of a host by SIGKILL, as when its power fails."""
        while processes := self.hosts[place].processes():
            self.hosts[place].kill(list(processes))
            time.sleep(0.05)

    def kill_raylet(self, place: int) -> None:
        """End the host's raylet alone by SIGKILL; returns when its workers have ended, which they do by themselves."""
        for process, command in self.hosts[place].processes().items():
            if "/raylet/raylet " in command:
                os.kill(process, signal.SIGKILL)
        while any(command.startswith("ray::") for command in self.hosts[place].processes().values()):
            time.sleep(0.1)
        time.sleep(2)  # a rank looks for its actor every 0.5 s

    def cut(self, place: int) -> None:
        """Pull the host's cable; :meth:`start` puts it back."""
        self.hosts[place].set_cable("down")

    def find(self, said: str, what: str) -> int:
        """The host whose line of the shown placement has ``what``."""
        (line,) = [line for line in said.splitlines() if "(node " in line and f": {what}; " in line]
        addresses: Mapping[str, int] = {host.address: place for place, host in enumerate(self.hosts)}
        return addresses[line.split()[0]]


def finish(process: subprocess.Popen[str], seconds: float) -> tuple[int, str, str]:
    """Wait for the end of a command: status, and what it said that was not read yet.

    Not by ``communicate()``, which loses what ``readline()`` has buffered.
    """
    too_long = threading.Timer(seconds, process.kill)
    too_long.start()
    with process:
        said, error = process.stdout.read(), process.stderr.read()
    too_long.cancel()
    return process.returncode, said, error


@contextmanager
def started_nodes(folder: Path) -> Iterator[Nodes]:
    """Four hosts with Ray on each for the block.

    Raises:
        OSError: namespaces cannot be made here.
    """
    with joined_hosts(4) as hosts:
        nodes = Nodes(hosts, folder)
        nodes.start(0)
        with ThreadPoolExecutor() as pool:
            list(pool.map(nodes.start, range(1, len(hosts))))
        yield nodes
