"""The Ray actor of a training rank. The rank itself is a child process of the actor, as under torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlox_grpo.distributed.ray_cluster.dashboard import DashboardGauges

LAST_BYTES = 4096
"""Bytes at the end of a log in which its last lines are looked for."""
LAST_LINES = 3


@dataclass(frozen=True)
class Ending:
    """How a rank or a server ended.

    Attributes:
        status: exit status; negative: the number of the signal that killed it.
        process: its process id.
        last_lines: the last lines of its log.
    """

    status: int
    process: int
    last_lines: str

    def describe(self) -> str:
        """How it ended, and the last lines of its log, indented."""
        how = f"was killed by signal {-self.status}" if self.status < 0 else f"ended with status {self.status}"
        return how + "".join(f"\n    {line}" for line in self.last_lines.splitlines())


class RankProcess:
    """The Ray actor that supervises one rank. ``run`` blocks its thread; other threads call the other methods.

    The rank is a child process because it handles signals in its main thread, because its libraries read their
    threads and devices from environment variables at the start, and because the heartbeat may end it.
    """

    def __init__(self, metrics: str | None = None) -> None:
        """Wait for :meth:`run`. With its output is read the run's ``metrics.jsonl``, for Ray's dashboard."""
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
        """The GPUs that Ray assigned to this actor, as ``CUDA_VISIBLE_DEVICES`` names them."""
        import ray

        return [str(gpu) for gpu in ray.get_runtime_context().get_accelerator_ids().get("GPU", [])]

    def run(self, arguments: Sequence[str], environment: Mapping[str, str], log: str, folder: str) -> Ending:
        """Run ``python ARGUMENTS`` until it ends.

        Args:
            arguments: after the interpreter's name.
            environment: variables that are added to the actor's own.
            log: file that its output is appended to.
            folder: its working directory; the actor's own if this node does not have it.
        """
        self._log = Path(log)
        self._read = self._log.stat().st_size if self._log.exists() else 0
        self._child = start_child(arguments, environment, self._log, folder)
        status = self._child.wait()
        return Ending(status, self._child.pid, read_last_lines(self._log))

    def stop(self, *, at_once: bool = False) -> None:
        """Ask the rank to save and stop (SIGTERM), or kill it."""
        if self._child is not None and self._child.poll() is None:
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


def start_child(
    arguments: Sequence[str], environment: Mapping[str, str], log: Path, folder: str
) -> subprocess.Popen[bytes]:
    """Start ``python ARGUMENTS`` in a session of its own; see :meth:`RankProcess.run`."""
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


def read_last_lines(log: Path) -> str:
    """Return the last lines of a log that are not blank."""
    with open(log, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join([line for line in lines if line.strip()][-LAST_LINES:])
