"""Start the processes of a run as Ray actors, print the output of rank 0, and end all ranks when one ends."""

from __future__ import annotations

import os
import re
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlox_grpo.distributed.addresses import ServerRegistry
from rlox_grpo.distributed.launcher import LAUNCHER_VARIABLE
from rlox_grpo.distributed.ray_cluster.cluster import (
    LOOK_S,
    Head,
    cleaned_up,
    joined_cluster,
    list_nodes,
    reserved_room,
    shorten,
)
from rlox_grpo.distributed.ray_cluster.elastic import ElasticEngines
from rlox_grpo.distributed.ray_cluster.placement import Placement, Sizes, make_rank_variables
from rlox_grpo.distributed.ray_cluster.processes import Ending, RankProcess
from rlox_grpo.distributed.ray_cluster.remote_file import serving_files
from rlox_grpo.distributed.ray_cluster.servers import RunningServers, Servers
from rlox_grpo.distributed.signals import stop_on_signal
from rlox_grpo.errors import EngineError, RankError

FORWARDED = ("RLOX_GRPO_", "HF_", "TRANSFORMERS_", "OMP_", "NCCL_", "GLOO_", "TORCH_", "VLLM_", "WANDB_", "TRACKIO_")
"""Prefixes of the driver's environment variables that the ranks get too: settings and tokens of the run."""

END_WITHIN_S = 45.0
"""Seconds beyond ``rank_timeout`` that the other ranks have to save and end, once one has ended."""
POLL_S = 0.5
STOPPED = 130
"""Exit status of a rank that a signal asked to stop, after its checkpoint."""

# Beginning of the last line of a rank that stopped because of another rank; see distributed.heartbeat.
_VICTIM = re.compile(r"rlox-grpo: (rank \d+ (\(|stops: )|the store of the ranks)")


@dataclass
class _Ranks:
    """The ranks of a run.

    Attributes:
        placements, actors: one of each for every rank.
        running: Ray's reference to the end of each running rank → its number.
        endings: the end of each finished rank, in this order.
        lost: a message for each lost rank.
    """

    ray: Any
    placements: Sequence[Placement]
    actors: Sequence[Any]
    running: dict[Any, int] = field(default_factory=dict)
    endings: dict[int, Ending] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)

    @property
    def have_failed(self) -> bool:
        """Whether a rank has not ended well."""
        return bool(self.lost) or any(ending.status for ending in self.endings.values())

    def start(
        self, arguments: Sequence[str], run_id: str, folder: Path, environment: Mapping[str, str]
    ) -> tuple[str, int]:
        """Start the rank of each actor; returns the address of their store."""
        master = self.placements[0].node.address
        port = self.ray.get(self.actors[0].open_store.remote(master))
        gpus = self.ray.get([actor.list_gpus.remote() for actor in self.actors])
        for placement, actor in zip(self.placements, self.actors, strict=True):
            # As under torchrun, a rank sees the GPUs of all ranks of its node, and its own is number LOCAL_RANK.
            seen = [gpu for other in self.placements if other.node == placement.node for gpu in gpus[other.index]]
            variables = {
                **environment,
                **make_rank_variables(placement, self.placements, (master, port), run_id),
                **({"CUDA_VISIBLE_DEVICES": ",".join(seen)} if seen else {}),
            }
            end = actor.run.remote(arguments, variables, str(folder / placement.log), os.getcwd())
            self.running[end] = placement.index
        return master, port

    def follow(self, say: Callable[[str], None]) -> None:
        """Wait for ends, at most ``POLL_S`` seconds, and show what rank 0 has written."""
        done, _ = self.ray.wait(list(self.running), timeout=POLL_S)
        self._show_output(say)
        for reference in done:
            rank = self.running.pop(reference)
            try:
                self.endings[rank] = self.ray.get(reference)
            except self.ray.exceptions.RayError as error:  # the actor or its node is gone, or its log cannot be written
                self.lost[rank] = f"was lost with its actor: {shorten(error)}"

    def _show_output(self, say: Callable[[str], None]) -> None:
        if 0 in self.lost:
            return
        try:
            text = self.ray.get(self.actors[0].read_output.remote(), timeout=10 * POLL_S)
        except (self.ray.exceptions.RayError, OSError):
            return
        if text:
            say(text)

    def stop(self) -> None:
        """Ask the running ranks to save and stop."""
        for rank in self.running.values():
            self.actors[rank].stop.remote()

    def kill(self, waited_s: float) -> None:
        """Kill the running ranks, which have not ended within ``waited_s`` seconds."""
        calls = {self.actors[rank].stop.remote(at_once=True): rank for rank in self.running.values()}
        done, _ = self.ray.wait(list(calls), num_returns=len(calls), timeout=10 * POLL_S)
        for call, rank in calls.items():
            how = " and was killed" if call in done else ", and its node is out of reach"
            self.lost[rank] = f"did not end within {waited_s:g} s{how}"

    def note_dead_nodes(self) -> None:
        """Add to the message of each lost rank whether its node is dead, which Ray's error may not have."""
        if self.lost:
            alive = {node.id for node in list_nodes(self.ray)}
            for rank in self.lost:
                if self.placements[rank].node.id not in alive:
                    self.lost[rank] += " (its node is dead)"

    def raise_failure(self, how_to_go_on: str) -> None:
        """Raise the error of the run, if it failed: first the rank that failed, then the ones that stopped for it."""
        if not self.have_failed:
            return
        if not self.lost and all(ending.status == STOPPED for ending in self.endings.values()):
            raise KeyboardInterrupt(self.endings[0].last_lines)
        bad = {rank: ending for rank, ending in self.endings.items() if ending.status}
        failures = {rank: f"(process {ending.process}) {ending.describe()}" for rank, ending in bad.items()} | self.lost

        def order(rank: int) -> tuple[bool, bool]:
            if rank in self.lost:
                return False, False
            return bad[rank].status > 0, _VICTIM.search(bad[rank].last_lines) is not None

        messages = [f"{self.placements[rank]} {failures[rank]}" for rank in sorted(failures, key=order)]
        raise RankError("\n".join(["\nthen ".join(messages), how_to_go_on]))


def launch_ranks(
    arguments: Sequence[str],
    *,
    address: str,
    sizes: Sizes,
    servers: Servers,
    rank_timeout: float,
    log_folder: Path | None,
    dry_run: bool,
    say: Callable[[str], None],
) -> None:
    """Run ``python ARGUMENTS`` as ranks: Ray actors with torchrun's environment variables.

    Args:
        arguments: the arguments of the Python interpreter.
        address: see :func:`rlox_grpo.distributed.ray_cluster.cluster.joined_cluster`.
        sizes: how many processes of each kind. The CPUs of a rank are also its ``OMP_NUM_THREADS``, unless the driver
            has that variable.
        servers: how engines and the reference are started.
        rank_timeout: heartbeat timeout of the run, in seconds.
        log_folder: gets ``rank_0.log``, … from each rank's node; None: a folder for temporary files there. Ray's
            dashboard shows the ``metrics.jsonl`` of the parent folder of ``log_folder``.
        dry_run: show the placement and start nothing.
        say: shows the placement and the output of rank 0.

    Raises:
        ImportError: Ray is not installed.
        ConfigError: no cluster, or one that cannot hold the ranks; the message has the numbers.
        EngineError: an engine or the reference did not start, and the message has the last lines of its log; or the
            reference's node was lost.
        RankError: a rank failed or died; the message has its number, its node, and the last lines of its log. Or the
            cluster's head node was lost (HeadLostError).
        KeyboardInterrupt: the ranks were asked to stop, wrote a checkpoint and stopped.
    """
    with (
        joined_cluster(address) as ray,
        reserved_room(ray, sizes) as room,
        serving_files(ray, room.placements[0].node, wanted=servers.reads_files(room) and not dry_run) as files,
    ):
        say(room.placement + "\n")
        if dry_run:
            return
        run_id = f"ray-{uuid.uuid4().hex[:12]}"
        folder = Path(tempfile.gettempdir()) / f"rlox-grpo-{run_id}" if log_folder is None else log_folder.absolute()
        forwarded = {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)}
        environment = {**servers.variables, **forwarded, **files, LAUNCHER_VARIABLE: "ray", "PYTHONUNBUFFERED": "1"}
        served = RunningServers(ray, room, servers, environment, folder, say)
        with cleaned_up(served.end):
            served.start_all()
            words = [*arguments, *servers.find(served.list_urls(), room)]
            metrics = None if log_folder is None else str(folder.parent / "metrics.jsonl")
            kind = ray.remote(RankProcess)
            options = {"max_restarts": 0, "max_concurrency": 4}
            actors = [
                kind.options(**room.make_options(placement), **options).remote(metrics) for placement in room.placements
            ]
            with cleaned_up(lambda: [ray.kill(actor) for actor in actors]):
                ranks = _Ranks(ray, room.placements, actors)
                threads = {"OMP_NUM_THREADS": f"{sizes.cpus_per_trainer}"}
                try:
                    registry = ServerRegistry(ranks.start(words, run_id, folder, {**threads, **environment}))
                except ray.exceptions.RayError as error:
                    raise RankError(
                        f"an actor of the ranks cannot start: {shorten(error)}; every node needs this version of "
                        "rlox_grpo"
                    ) from error
                elastic = ElasticEngines(served, registry)
                with cleaned_up(elastic.end):
                    _watch(ranks, served, elastic, registry, rank_timeout, say)
        how = (
            "nothing was saved: the run has no output_dir"
            if log_folder is None
            else "the same command continues the run"
        )
        end = "\n".join([*served.losses, f"the logs of all ranks: {folder}; {how}"])
        if served.is_fatal and any(ending.status == STOPPED for ending in ranks.endings.values()):
            raise EngineError(end)
        ranks.raise_failure(end)


def _watch(
    ranks: _Ranks,
    served: RunningServers,
    elastic: ElasticEngines,
    registry: ServerRegistry,
    rank_timeout: float,
    say: Callable[[str], None],
) -> None:
    """Wait until all ranks have ended; after the first failure the others have a deadline."""
    deadline: float | None = None
    has_stopped = False
    next_look = 0.0
    head = Head(ranks.ray.get_runtime_context().gcs_address)
    with stop_on_signal() as stop:
        while ranks.running:
            ranks.follow(say)
            if time.monotonic() >= next_look:
                if head.require():
                    served.follow(registry)
                    elastic.follow()
                next_look = time.monotonic() + LOOK_S
            if (stop or served.is_fatal) and not has_stopped:
                has_stopped = True
                ranks.stop()
            if deadline is None and (ranks.have_failed or has_stopped):
                deadline = time.monotonic() + rank_timeout + END_WITHIN_S
            if deadline is not None and time.monotonic() > deadline:
                ranks.kill(rank_timeout + END_WITHIN_S)
                break
    while not head.require():  # Ray's calls below would wait for it
        time.sleep(POLL_S)
    ranks.note_dead_nodes()
