"""Choose the server of each request, and measure the requests, tokens and transfers of each server."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock

from rlox_grpo.rollout.engines.vllm.connection import ServerConnection


@dataclass
class _Work:
    """Counts of one server since the last metrics.

    Attributes:
        in_flight, most: requests in flight, and their maximum.
        tokens, busy_s: sampled tokens, and seconds with a request in flight.
        since: start of the current busy period.
        restarts, transfer_s: restarts, and seconds of weight transfers.
    """

    in_flight: int = 0
    most: int = 0
    tokens: int = 0
    busy_s: float = 0.0
    since: float = 0.0
    restarts: int = 0
    transfer_s: float = 0.0


class Router:
    """Distributes this rank's requests over the servers by load.

    A rank sends each server at most its share of the rows that the server decodes at a time. Other prompts wait in the
    rank until a reply arrives. No server therefore has a queue, and no server is idle while prompts wait.
    """

    def __init__(self, servers: Sequence[ServerConnection], ranks: int) -> None:
        """Begin without requests.

        Args:
            servers: the servers of the run, in the same order on all ranks.
            ranks: number of processes that use the same servers.
        """
        self._rows, self._ranks = 0, ranks
        self._work: dict[ServerConnection, _Work] = {}
        self._waiting_most = 0
        self._lock = Lock()
        self.replace(servers)

    def replace(self, servers: Sequence[ServerConnection]) -> None:
        """Replace the list of servers; servers that stay keep their counts."""
        with self._lock:
            self._rows = min(server.rows for server in servers)
            self._work = {server: self._find(server) for server in servers}

    def limit_requests(self, group_size: int) -> int:
        """Return how many requests of ``group_size`` completions this rank may have in flight, over all servers."""
        return max(1, self._rows // (group_size * self._ranks)) * len(self._work)

    def note_waiting(self, count: int) -> None:
        """Note that ``count`` prompts wait in this rank."""
        with self._lock:
            self._waiting_most = max(self._waiting_most, count)

    @contextmanager
    def server(self, prompt_index: int, *, stays: bool) -> Iterator[ServerConnection | None]:
        """Choose a server for one request, which counts as in flight during the block; None if none is up.

        Args:
            prompt_index: index of the prompt in the whole step, so that ranks begin with different servers.
            stays: use the same server for the same ``prompt_index`` regardless of load, for its prefix cache.
        """
        with self._lock:
            up = [server for server in self._work if server.is_up]
            turned = up[prompt_index % len(up) :] + up[: prompt_index % len(up)] if up else []
            chosen, work = None, _Work()
            if turned:
                chosen = turned[0] if stays else min(turned, key=lambda server: self._work[server].in_flight)
                work = self._work[chosen]
            if not work.in_flight:
                work.since = time.monotonic()
            work.in_flight += 1
            work.most = max(work.most, work.in_flight)
        try:
            yield chosen
        finally:
            with self._lock:
                work.in_flight -= 1
                if not work.in_flight:
                    work.busy_s += time.monotonic() - work.since

    def note_tokens(self, server: ServerConnection, tokens: int) -> None:
        """Note that ``server`` has sampled ``tokens``."""
        with self._lock:
            self._find(server).tokens += tokens

    def note_transfer(self, server: ServerConnection, seconds: float, *, is_restart: bool) -> None:
        """Count a transfer of weights; ``is_restart``: the server had lost its weights."""
        with self._lock:
            work = self._find(server)
            work.transfer_s += seconds
            work.restarts += is_restart

    def take_metrics(self) -> dict[str, float]:
        """Return what was measured since the last call, by the names of docs/reference/metrics.md."""
        metrics: dict[str, float] = {}
        with self._lock:
            now = time.monotonic()
            for index, work in enumerate(self._work.values()):
                busy = work.busy_s + (now - work.since if work.in_flight else 0.0)
                server_metrics = {"requests_max": work.most, "restarts": work.restarts, "transfer_s": work.transfer_s}
                server_metrics["tokens_per_s"] = work.tokens / busy if busy else 0.0
                metrics |= {f"engines/{index}/{name}": float(value) for name, value in server_metrics.items()}
                # The counts are reset in place, because requests in flight end later.
                work.most, work.tokens, work.busy_s, work.since = work.in_flight, 0, 0.0, now
                work.restarts, work.transfer_s = 0, 0.0
            metrics["engines/waiting_max"] = float(self._waiting_most)
            self._waiting_most = 0
        return metrics

    def _find(self, server: ServerConnection) -> _Work:
        """Return the counts of ``server``; new counts for a server that has left or joins."""
        return self._work.get(server) or _Work()
