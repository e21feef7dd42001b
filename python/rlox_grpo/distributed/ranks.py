"""Training ranks: process groups, collectives, and a common end on failure.

Every rank runs the same program and calls every collective. With one process every collective is a no-op.
"""

from __future__ import annotations

import atexit
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlox_grpo.distributed.addresses import connect_store, find_store
from rlox_grpo.distributed.heartbeat import Heartbeat, is_lost_connection, open_store
from rlox_grpo.distributed.host_group import HostGroup
from rlox_grpo.distributed.launcher import end_with_launcher
from rlox_grpo.distributed.signals import stop_on_signal
from rlox_grpo.errors import ConfigError, RankError

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables that torchrun and the deepspeed launcher set in each process."""

# Collectives outside the update have practically no timeout: the heartbeat finds dead ranks, and a rank may wait long
# for completions, rewards or checkpoints. Within an update a rank waits for one micro-batch at most.
_PATIENCE = timedelta(days=7)
_UPDATE_PATIENCE = timedelta(minutes=30)

_LET_GO_S = 0.5
"""Seconds before exit for gloo's threads to finish; they need microseconds, on a busy machine more."""

_BUCKET = 2**25
"""Number of values summed over ranks at once: 128 MiB of float32."""


@dataclass(frozen=True, eq=False)
class Ranks:
    """The rank of this process and the collectives over all ranks.

    Attributes:
        rank: 0 to ``size`` − 1; rank 0 writes.
        size: processes of the run.
        timeout: heartbeat timeout between ranks, in seconds.
        host: collectives of values in host memory, for the main thread.
        engine_size: consecutive ranks that share one generation engine, and must sample the same prompts.
    """

    rank: int = 0
    size: int = 1
    timeout: float = 30.0
    host: HostGroup = field(default_factory=HostGroup)
    engine_size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this rank writes the run's folder, console and checkpoints."""
        return self.rank == 0

    def share(self, count: int) -> slice:
        """The slice of ``count`` items for this rank. Slices are in the order of ranks; sizes differ by one at most."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def engine_share(self, count: int) -> slice:
        """The slice of ``count`` items for all ranks that share this rank's engine: their shares, joined."""
        first = self.rank - self.rank % self.engine_size
        return slice(count * first // self.size, count * (first + self.engine_size) // self.size)

    def new_host_group(self, size: int | None = None) -> HostGroup:
        """Create a process group over gloo, for the collectives of one more thread. Every rank calls this.

        Args:
            size: number of consecutive ranks in a group; None: one group of all ranks.
        """
        size = size or self.size
        if size == 1:
            return HostGroup()
        starts = range(0, self.size, size)
        groups = [dist.new_group(range(at, at + size), backend="gloo", timeout=_PATIENCE) for at in starts]
        return HostGroup(self.rank % size, size, groups[self.rank // size])

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """All-gather bytes: each rank's ``data``, in the order of ranks."""
        return self.host.gather_bytes(data)

    def gather(self, value: Any) -> list[Any]:
        """All-gather JSON values, in the order of ranks."""
        return self.host.gather(value)

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is set on any rank."""
        return any(self.gather(bool(flag)))

    def refuse_differences(self, what: str, values: dict[str, Any]) -> None:
        """Raise ConfigError if another rank has different ``values``; it names the first difference."""
        mine = json.loads(json.dumps(values))
        for rank, other in enumerate(self.gather(values)):
            for name in {**mine, **other}:
                if other.get(name) != mine.get(name):
                    raise ConfigError(
                        f"{what}: {name} is {other.get(name)!r} on rank {rank} and {mine.get(name)!r} on rank "
                        f"{self.rank}; every rank runs the same program with the same values"
                    )

    def sum_tensors(self, tensors: Sequence[Tensor]) -> None:
        """All-reduce tensors of one dtype and device: replace each by its sum over ranks, the same bits everywhere."""
        if self.size == 1:
            return
        bucket: list[Tensor] = []
        for index, tensor in enumerate(tensors):
            bucket.append(tensor)
            if index + 1 == len(tensors) or sum(member.numel() for member in bucket) >= _BUCKET:
                flat = torch.cat([member.reshape(-1) for member in bucket])
                dist.all_reduce(flat)
                sums = torch.split(flat, [member.numel() for member in bucket])
                for member, values in zip(bucket, sums, strict=True):
                    member.copy_(values.view_as(member))
                bucket = []

    @torch.no_grad()
    def broadcast(self, model: nn.Module, masters: Mapping[str, Tensor] = MappingProxyType({})) -> None:
        """Copy rank 0's parameters, buffers and master weights, which are in host memory, to every rank.

        Raises:
            ConfigError: the models of two ranks differ in a name, a shape, a dtype, or in what is trained. Nothing is
                copied.
        """
        if self.size == 1:
            return
        tensors = chain(model.named_parameters(), model.named_buffers())
        forms = {
            name: f"{tuple(tensor.shape)} {tensor.dtype}{' trained' * tensor.requires_grad}" for name, tensor in tensors
        }
        self.refuse_differences("ranks have different models", forms)
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.data, src=0)
        device = next(model.parameters()).device
        for master in masters.values():
            staged = master.to(device)
            dist.broadcast(staged, src=0)
            master.copy_(staged)

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """End all ranks when one fails or dies within the block.

        Raises:
            RankError: another rank failed or died; the message names it and its error. A rank that cannot raise, as it
                hangs in a collective, prints that and exits with status 1.
        """
        if self.size == 1:
            yield
            return
        heartbeat = Heartbeat(open_store(self.timeout), self.rank, self.size, self.timeout)
        heartbeat.start()
        # A launcher sends SIGTERM to the other ranks as soon as one has died. They report the reason first.
        with stop_on_signal() as stop:
            try:
                yield
                self.gather(None)  # a barrier: no rank leaves while another can still fail
            except BaseException as error:
                culprit = heartbeat.find_culprit() if is_lost_connection(error) else None
                if culprit is None:
                    heartbeat.tell(error)
                    raise
                raise RankError(culprit) from error
            finally:
                heartbeat.stop()
        if stop:
            raise KeyboardInterrupt(f"stopped by {stop.name}")


def join_ranks(timeout: float = 30.0, engine_size: int = 1) -> Ranks:
    """Join the process group if a launcher started several ranks; an existing process group is used.

    Collectives run over NCCL with CUDA, else over gloo; each process takes the device of its local rank.

    Args:
        timeout: heartbeat timeout, in seconds.
        engine_size: consecutive ranks that share one generation engine (``tensor_parallel_size``).

    Raises:
        ConfigError: only some of the launcher's variables are set, or ``engine_size`` does not divide the number of
            ranks.
        RankError: the launcher has died.
    """
    end_with_launcher()  # first: joining waits half an hour for ranks that have died
    has_joined = dist.is_initialized()
    size = dist.get_world_size() if has_joined else int(os.environ.get("WORLD_SIZE", "1"))
    if size % engine_size:
        raise ConfigError(
            f"tensor_parallel_size={engine_size} does not divide the {size} processes of this run: start a "
            "multiple of it by torchrun, or use engine='vllm_server'"
        )
    if not has_joined and size > 1:
        missing = [name for name in LAUNCHER_VARIABLES if name not in os.environ]
        if missing:
            raise ConfigError(
                f"WORLD_SIZE is {size} and {', '.join(missing)} missing: start the ranks by torchrun or deepspeed, or "
                "unset WORLD_SIZE to train in one process"
            )
        _take_device()
        _require_launchers_store(timeout)
        _enter(timeout=_UPDATE_PATIENCE)
    elif has_joined:
        _take_device()
    if size == 1:
        return Ranks(timeout=timeout)
    ranks = Ranks(dist.get_rank(), size, timeout, engine_size=engine_size)
    return replace(ranks, host=ranks.new_host_group())


def _require_launchers_store(timeout: float) -> None:
    """Raise RankError if torchrun's store does not answer within ``timeout``.

    The store starts before the ranks. Without this check a rank whose launcher was killed while it imported its
    modules would wait half an hour for the others.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return  # rank 0 makes the store
    address, port = find_store()
    try:
        connect_store((address, port), timeout)
    except dist.DistError as error:
        raise RankError(
            f"torchrun's store at {address}:{port} does not answer within {timeout:g} s: the launcher is gone or its "
            "host is out of reach; start the run again"
        ) from error


def _take_device() -> None:
    """Use the GPU of this process's local rank, even if the program made its own process group."""
    if torch.cuda.is_available() and "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


def join_alone() -> None:
    """Create a process group of one process, without a port, if there is none: DeepSpeed needs one."""
    if not dist.is_initialized():
        _enter(store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    os.environ.setdefault("LOCAL_RANK", "0")


def _enter(**how: Any) -> None:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", **how)
    atexit.register(_leave)


def _leave() -> None:
    """Close the groups, and give gloo's threads time to release their tensors before Python ends.

    A thread that releases the last reference to a tensor takes the interpreter's lock. While the interpreter ends, this
    aborts the process (pytorch/pytorch#179291). Closing a group does not wait for its threads as long as a DeepSpeed
    engine or a trainer references the group.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    time.sleep(_LET_GO_S)
