"""The Ray actors of the processes of a run: a training rank, and a server (a generation engine or the reference).

The process itself is a child of its actor, as under torchrun.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlox_grpo.distributed.ray_cluster.dashboard import DashboardGauges
from rlox_grpo.distributed.ray_cluster.remote_file import NODE_VARIABLE

HOST, PORT = "{host}", "{port}"
"""Placeholders in a server's arguments."""

POLL_S = 0.5
STOP_S = 15.0
"""Seconds between SIGTERM and SIGKILL of a server."""
LAST_BYTES = 4096
"""Number of bytes at the end of a log in which its last lines are searched."""
LAST_LINES = 3


@dataclass(frozen=True)
class Ending:
    """How a rank or a server ended.

    Attributes:
        status: exit status; negative: the number of the signal that killed it.
        process: the process id.
        last_lines: the last lines of the process's log.
    """

    status: int
    process: int
    last_lines: str

    def describe(self) -> str:
        """Describe how the process ended, with the last lines of its log, indented."""
        how = f"was killed by signal {-self.status}" if self.status < 0 else f"ended with status {self.status}"
        return how + "".join(f"\n    {line}" for line in self.last_lines.splitlines())


def start_child(
    arguments: Sequence[str], environment: Mapping[str, str], log: Path, folder: str
) -> subprocess.Popen[bytes]:
    """Start ``python ARGUMENTS`` in a session of its own.

    Args:
        arguments: the arguments of the Python interpreter.
        environment: variables that are added to the actor's own.
        log: the file to which the output of the process is appended.
        folder: the working directory of the process; the actor's own if this node does not have the folder.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as output:
        return subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder if os.path.isdir(folder) else None,
            env={**os.environ, **environment},
            start_new_session=True,  # a terminal's Ctrl-C goes to the driver, which asks all ranks to stop
        )


def wait_for_end(child: subprocess.Popen[bytes], log: Path) -> Ending:
    """Wait until a child has ended, and read the last lines of its log that are not blank."""
    status = child.wait()
    with open(log, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return Ending(status, child.pid, "\n".join([line for line in lines if line.strip()][-LAST_LINES:]))


class RankProcess:
    """The Ray actor that supervises one rank. ``run`` blocks its thread; other threads call the other methods.

    The rank is a child process because it handles signals in its main thread, because its libraries read their
    threads and devices from environment variables at the start, and because the heartbeat may end it.
    """

    def __init__(self, metrics: str | None = None) -> None:
        """Wait for :meth:`run`. The run's ``metrics.jsonl`` is read together with the output, for Ray's dashboard."""
        self._gauges = None if metrics is None else DashboardGauges(Path(metrics))
        self._child: subprocess.Popen[bytes] | None = None
        self._store: Any = None
        self._log = Path()
        self._read = 0

    def open_store(self, address: str) -> int:
        """Open the ranks' rendezvous store in this process, for as long as it lives; returns its port."""
        import torch.distributed as dist

        self._store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        return int(self._store.port)

    def list_gpus(self) -> list[str]:
        """Return the GPUs that Ray assigned to this actor, as ``CUDA_VISIBLE_DEVICES`` names them."""
        import ray

        return [str(gpu) for gpu in ray.get_runtime_context().get_accelerator_ids().get("GPU", [])]

    def run(self, arguments: Sequence[str], environment: Mapping[str, str], log: str, folder: str) -> Ending:
        """Run ``python ARGUMENTS`` until it ends; see :func:`start_child`."""
        self._log = Path(log)
        self._read = self._log.stat().st_size if self._log.exists() else 0
        self._child = start_child(arguments, environment, self._log, folder)
        return wait_for_end(self._child, self._log)

    def stop(self, *, at_once: bool = False) -> None:
        """Ask the rank to save and stop (SIGTERM), or kill it."""
        if self._child is not None:
            self._child.send_signal(signal.SIGKILL if at_once else signal.SIGTERM)

    def read_output(self) -> str:
        """Return what the rank has written since the last call, and bring the gauges of the dashboard up to date."""
        if self._gauges is not None:
            self._gauges.follow()
        if self._child is None:
            return ""
        with open(self._log, "rb") as file:
            file.seek(self._read)
            data = file.read()
        self._read += len(data)
        return data.decode(errors="replace")


def find_port(address: str) -> int:
    """Return a port of this node that is free now."""
    with socket.create_server((address, 0)) as listener:
        return int(listener.getsockname()[1])


def _wait_until_free(address: tuple[str, int]) -> None:
    """Wait until the previous server has closed the port, at most ``STOP_S`` seconds."""
    deadline = time.monotonic() + STOP_S
    while time.monotonic() < deadline:
        with suppress(OSError):
            socket.create_server(address).close()
            return
        time.sleep(POLL_S)


class ServerProcess:
    """The Ray actor that supervises one server.

    When a server dies after it has listened, the actor exits. Ray then starts both again, at the same address while the
    node lives. When the node is lost, Ray starts the actor on another node that has room, and the server listens there.
    """

    def __init__(
        self, arguments: Sequence[str], address: tuple[str, int], environment: Mapping[str, str], log: str, folder: str
    ) -> None:
        """Start ``python ARGUMENTS``, with :data:`HOST` and :data:`PORT` in them; see :func:`start_child`.

        ``address`` is the host and port that the server listens on, on its first node.
        """
        import ray

        self._log = Path(log)
        self._has_listened = ray.get_runtime_context().was_current_actor_reconstructed
        self._is_stopping = False
        here = str(ray.util.get_node_ip_address())
        self._address = address
        if self._has_listened and here != address[0]:
            self._address = (here, find_port(here))
        elif self._has_listened:
            _wait_until_free(address)
        values = {HOST: self._address[0], PORT: str(self._address[1])}
        words = [values.get(word, word) for word in arguments]
        self._child = start_child(words, {**environment, NODE_VARIABLE: here}, self._log, folder)
        threading.Thread(target=self._end_with_child, name="rlox-grpo-server", daemon=True).start()

    def wait_until_listening(self, seconds: float) -> Ending | None:
        """Wait until the server accepts connections; returns how it ended if it died before that.

        Raises:
            TimeoutError: the server neither listens nor ends within ``seconds``.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._child.poll() is not None:
                return wait_for_end(self._child, self._log)
            with suppress(OSError):
                socket.create_connection(self._address, timeout=POLL_S).close()
                self._has_listened = True
                return None
            time.sleep(POLL_S)
        raise TimeoutError(f"the server at {self._address} does not listen after {seconds:g} s; its log: {self._log}")

    def find_address(self) -> tuple[str, str, int]:
        """Return Ray's id of the node, and host and port of the server."""
        import ray

        return (str(ray.get_runtime_context().get_node_id()), *self._address)

    def stop(self) -> None:
        """End the server by SIGTERM, and after ``STOP_S`` seconds by SIGKILL."""
        self._is_stopping = True
        self._child.terminate()
        try:
            self._child.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._child.pid, signal.SIGKILL)

    def _end_with_child(self) -> None:
        self._child.wait()
        with suppress(ProcessLookupError):  # what is left of its group, such as vLLM's engine
            os.killpg(self._child.pid, signal.SIGKILL)
        if self._has_listened and not self._is_stopping:
            os._exit(1)
