"""All-gathers of values in host memory, over a gloo process group."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True, eq=False)
class HostGroup:
    """A gloo process group and this process's place in it. One thread of each process calls the collectives.

    Two threads that share a process group may start their collectives in different orders on different ranks, and
    torch would match the wrong ones. Each thread therefore gets its own group (:meth:`Ranks.new_host_group`).

    Attributes:
        rank: 0 to ``size`` − 1.
        size: processes of the group.
        group: the torch process group; None with one process, where every collective is a no-op.
    """

    rank: int = 0
    size: int = 1
    group: Any = None

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """All-gather bytes: each rank's ``data``, in the order of ranks."""
        if self.size == 1:
            return [data]
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(data)]), group=self.group)
        sizes = [int(length) for length in lengths]
        mine = torch.zeros(max(1, *sizes), dtype=torch.uint8)
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else mine[:0]
        buffers = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(buffers, mine, group=self.group)
        return [buffer[:size].numpy().tobytes() for buffer, size in zip(buffers, sizes, strict=True)]

    def gather(self, value: Any) -> list[Any]:
        """All-gather JSON values, in the order of ranks."""
        if self.size == 1:
            return [value]
        return [json.loads(encoded) for encoded in self.gather_bytes(json.dumps(value).encode())]
