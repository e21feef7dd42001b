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
from rlox_grpo.distributed.ray_cluster.cluster import Room, joined_cluster, list_nodes, reserved_room
from rlox_grpo.distributed.ray_cluster.elastic import ElasticEngines
from rlox_grpo.distributed.ray_cluster.head import Head, cleaned_up
from rlox_grpo.distributed.ray_cluster.placement import Place, Sizes, make_rank_variables
from rlox_grpo.distributed.ray_cluster.rank_process import Ending, RankProcess
from rlox_grpo.distributed.ray_cluster.remote_file import serving_files
from rlox_grpo.distributed.ray_cluster.servers import RunningServers, Servers, running_servers
from rlox_grpo.distributed.signals import stop_on_signal
from rlox_grpo.errors import EngineError, RankError

FORWARDED = ("RLOX_GRPO_", "HF_", "TRANSFORMERS_", "OMP_", "NCCL_", "GLOO_", "TORCH_", "VLLM_", "WANDB_", "TRACKIO_")
"""Prefixes of the driver's environment variables that the ranks get too: settings and tokens of the run."""

END_WITHIN_S = 45.0
"""Seconds beyond ``rank_timeout`` that the other ranks have to save and end, once one has ended."""
POLL_S = 0.5
SHOWN = 600
"""Most characters that are shown of Ray's own error message."""
STOPPED = 130
"""Exit status of a rank that a signal asked to stop, after its checkpoint."""

# Beginning of the last line of a rank that stopped because of another rank; see distributed.heartbeat.
_VICTIM = re.compile(r"rlox-grpo: (rank \d+ \(|the store of the ranks|a connection to another rank)")


@dataclass
class _Watched:
    """The ranks of a run.

    Attributes:
        places, actors: place and actor of each rank.
        running: Ray's reference to the end of each running rank → its number.
        endings: the end of each finished rank, in this order.
        lost: for each lost rank, a message.
    """

    places: Sequence[Place]
    actors: Sequence[Any]
    running: dict[Any, int]
    endings: dict[int, Ending] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)


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
        arguments: after the interpreter's name.
        address: see :func:`rlox_grpo.distributed.ray_cluster.cluster.joined_cluster`.
        sizes: how many processes of each kind. The CPUs of a rank are also its ``OMP_NUM_THREADS``, unless the driver
            has that variable.
        servers: how engines and the reference are started.
        rank_timeout: heartbeat timeout of the run, in seconds.
        log_folder: gets ``rank_0.log``, … from each rank's node; None: a folder for temporary files there. The
            ``metrics.jsonl`` of the folder that it is in is shown in Ray's dashboard.
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
        serving_files(ray, room.places[0].node, wanted=servers.reads_files(room) and not dry_run) as files,
    ):
        say(room.placement + "\n")
        if dry_run:
            return
        run_id = f"ray-{uuid.uuid4().hex[:12]}"
        folder = Path(tempfile.gettempdir()) / f"rlox-grpo-{run_id}" if log_folder is None else log_folder.absolute()
        forwarded = {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)}
        environment = {**servers.variables, **forwarded, **files, LAUNCHER_VARIABLE: "ray", "PYTHONUNBUFFERED": "1"}
        with running_servers(ray, room, servers, environment, folder, say) as served:
            words = [*arguments, *servers.find(served.list_urls(), room)]
            metrics = None if log_folder is None else str(folder.parent / "metrics.jsonl")
            actors = [_make_actor(ray, room, place, None if place.index else metrics) for place in room.places]
            with cleaned_up(lambda: [ray.kill(actor) for actor in actors]):
                threads = {"OMP_NUM_THREADS": f"{sizes.cpus_per_trainer}"}
                try:
                    running, store = _start(ray, actors, room.places, words, run_id, folder, {**threads, **environment})
                except ray.exceptions.RayError as error:
                    raise RankError(
                        f"an actor of the ranks cannot start: {_shorten(error)}; every node needs this version of "
                        "rlox_grpo"
                    ) from error
                watched = _Watched(room.places, actors, running)
                registry = ServerRegistry(store)
                elastic = ElasticEngines(served, registry)
                with cleaned_up(elastic.end):
                    _watch(ray, watched, served, elastic, registry, rank_timeout, say)
        how = (
            "nothing was saved: the run has no output_dir"
            if log_folder is None
            else "the same command continues the run"
        )
        end = "\n".join([*served.losses, f"the logs of all ranks: {folder}; {how}"])
        if served.is_fatal and any(ending.status == STOPPED for ending in watched.endings.values()):
            raise EngineError(end)
        _raise_failure(watched, end)


def _make_actor(ray: Any, room: Room, place: Place, metrics: str | None) -> Any:
    kind = ray.remote(RankProcess).options(**room.make_options(place), max_restarts=0, max_concurrency=4)
    return kind.remote(metrics)


def _start(
    ray: Any,
    actors: Sequence[Any],
    places: Sequence[Place],
    arguments: Sequence[str],
    run_id: str,
    folder: Path,
    environment: Mapping[str, str],
) -> tuple[dict[Any, int], tuple[str, int]]:
    """Start the rank of each actor; returns Ray's reference to each ending → the rank, and the address of the store."""
    master = places[0].node.address
    port = ray.get(actors[0].open_store.remote(master))
    gpus = ray.get([actor.list_gpus.remote() for actor in actors])
    running = {}
    for place, actor in zip(places, actors, strict=True):
        # As under torchrun, a rank sees the GPUs of all ranks of its node, and its own is number LOCAL_RANK.
        seen = [gpu for other in places if other.node == place.node for gpu in gpus[other.index]]
        own = {
            **environment,
            **make_rank_variables(place, places, (master, port), run_id),
            **({"CUDA_VISIBLE_DEVICES": ",".join(seen)} if seen else {}),
        }
        log = str(folder / place.log)
        running[actor.run.remote(arguments, own, log, os.getcwd())] = place.index
    return running, (master, port)


def _watch(
    ray: Any,
    watched: _Watched,
    served: RunningServers,
    elastic: ElasticEngines,
    registry: ServerRegistry,
    rank_timeout: float,
    say: Callable[[str], None],
) -> None:
    """Wait until all ranks have ended; after the first failure the others have a deadline."""
    deadline: float | None = None
    told = False
    head = Head(ray.get_runtime_context().gcs_address)
    with stop_on_signal() as stop:
        while watched.running:
            done, _ = ray.wait(list(watched.running), timeout=POLL_S)
            _show_output(ray, watched, say)
            for reference in done:
                _note_ending(ray, watched, reference)
            if head.require():
                served.follow(registry)
                elastic.follow()
            if (stop or served.is_fatal) and not told:
                told = True
                for rank in watched.running.values():
                    watched.actors[rank].stop.remote()
            failed = watched.lost or any(ending.status for ending in watched.endings.values())
            if deadline is None and (failed or told):
                deadline = time.monotonic() + rank_timeout + END_WITHIN_S
            if deadline is not None and time.monotonic() > deadline:
                watched.lost |= _kill(ray, watched, rank_timeout + END_WITHIN_S)
                break
    while not head.require(at_once=True):  # Ray's calls below would wait for it
        time.sleep(POLL_S)
    _note_dead_nodes(ray, watched)


def _kill(ray: Any, watched: _Watched, waited_s: float) -> dict[int, str]:
    """Kill the running ranks; returns a message for each."""
    calls = {watched.actors[rank].stop.remote(at_once=True): rank for rank in watched.running.values()}
    done, out_of_reach = ray.wait(list(calls), num_returns=len(calls), timeout=10 * POLL_S)
    how = dict.fromkeys((calls[call] for call in done), f"did not end within {waited_s:g} s and was killed")
    told = f"did not end within {waited_s:g} s, and its node is out of reach"
    return how | {calls[call]: told for call in out_of_reach}


def _note_ending(ray: Any, watched: _Watched, reference: Any) -> None:
    rank = watched.running.pop(reference)
    try:
        watched.endings[rank] = ray.get(reference)
    except ray.exceptions.RayError as error:  # the actor or its node is gone, or its log cannot be written
        watched.lost[rank] = f"was lost with its actor: {_shorten(error)}"


def _note_dead_nodes(ray: Any, watched: _Watched) -> None:
    """Add to the message of each lost rank whether its node is dead, which Ray's error may not have."""
    if watched.lost:
        alive = {node.id for node in list_nodes(ray)}
        for rank in watched.lost:
            if watched.places[rank].node.id not in alive:
                watched.lost[rank] += " (its node is dead)"


def _shorten(error: Exception) -> str:
    return " ".join(str(error).split())[:SHOWN]


def _show_output(ray: Any, watched: _Watched, say: Callable[[str], None]) -> None:
    if 0 in watched.lost:
        return
    try:
        text = ray.get(watched.actors[0].read_output.remote(), timeout=10 * POLL_S)
    except (ray.exceptions.RayError, OSError):
        return
    if text:
        say(text)


def _raise_failure(watched: _Watched, how_to_go_on: str) -> None:
    """Raise the error of the run. It lists the rank that failed first, then the ranks that stopped because of it."""
    bad = {rank: ending for rank, ending in watched.endings.items() if ending.status}
    if not bad and not watched.lost:
        return
    if not watched.lost and all(ending.status == STOPPED for ending in watched.endings.values()):
        raise KeyboardInterrupt(watched.endings[0].last_lines)
    found = {**{rank: _describe_ending(ending) for rank, ending in bad.items()}, **watched.lost}

    def order(rank: int) -> tuple[bool, bool]:
        ending = bad.get(rank)
        killed = ending is None or ending.status < 0
        return not killed, ending is not None and _VICTIM.search(ending.last_lines) is not None

    first, *others = sorted(found, key=order)
    addresses = {place.index: place.node.address for place in watched.places}
    lines = [f"rank {first} on {addresses[first]} {found[first]}"]
    lines += [f"then rank {rank} on {addresses[rank]} {found[rank]}" for rank in others]
    raise RankError("\n".join([*lines, how_to_go_on]))


def _describe_ending(ending: Ending) -> str:
    how = f"was killed by signal {-ending.status}" if ending.status < 0 else f"ended with status {ending.status}"
    said = "".join(f"\n    {line}" for line in ending.last_lines.splitlines())
    return f"(process {ending.process}) {how}{said}"
