"""Join or start a Ray cluster, reserve room on it for the processes of a run, and detect the loss of its head node."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from rlox_grpo.distributed.ray_cluster.placement import (
    Node,
    Placement,
    Sizes,
    describe,
    list_counts,
    plan_placements,
    require_room,
)
from rlox_grpo.errors import ConfigError, RankError, import_extra

QUIET = {"log_to_driver": False, "logging_level": "warning"}
"""Arguments of ``ray.init``."""
OBJECT_STORE_BYTES = 100 * 2**20
"""Size of the object store of a cluster that is started here: new weights pass through it in chunks of 16 MiB."""
ANSWER_WITHIN_S = 10.0
"""Seconds to wait for the address of a cluster."""
SHOWN = 600
"""Most characters that are shown of Ray's own error message."""
ROOM_WITHIN_S = 60.0
"""Seconds to wait for room that something else on the cluster uses."""

LOST_S = 20.0
"""Seconds without an answer after which the head is lost. Ray's own limit, after which its nodes end, is 60 s."""
LOOK_S = 2.0
"""Timeout of a check of the head, and seconds between two looks at the head and at the servers."""


class HeadLostError(RankError):
    """The head node of the Ray cluster does not answer. Ray's own calls would wait, and end this process after 60 s."""


class Head:
    """Checks whether the control service of a cluster accepts connections."""

    def __init__(self, address: str) -> None:
        """Begin at ``HOST:PORT`` of the service; nothing is sent yet."""
        host, _, port = address.rpartition(":")
        self._address = (host, int(port))
        self._answered = time.monotonic()

    def require(self) -> bool:
        """Return whether the control service answers. If not, calls of Ray may block for minutes.

        Raises:
            HeadLostError: the head has not answered for ``LOST_S`` seconds.
        """
        try:
            socket.create_connection(self._address, timeout=LOOK_S).close()
        except OSError as error:
            silent_s = time.monotonic() - self._answered
            if silent_s > LOST_S:
                host, port = self._address
                raise HeadLostError(
                    f"the head node of the Ray cluster, {host}:{port}, is lost: it has not answered for "
                    f"{silent_s:.0f} s ({error}). Every rank that still runs saves and stops, at the latest a minute "
                    "after the loss, when Ray ends on the other nodes. Start the cluster again; the same command "
                    "continues the run"
                ) from error
            return False
        self._answered = time.monotonic()
        return True


@contextmanager
def cleaned_up(clean: Callable[[], object]) -> Iterator[None]:
    """Call ``clean`` at the end of the block, unless the head is lost: the call would wait for it."""
    try:
        yield
    except HeadLostError:
        raise
    except BaseException:
        clean()
        raise
    clean()


@contextmanager
def joined_cluster(address: str) -> Iterator[Any]:
    """Join a Ray cluster for the block and yield the module ``ray``; a cluster that was started here ends with it.

    Args:
        address: ``auto`` joins the cluster that ``RAY_ADDRESS`` or this machine's ``ray start`` names, and starts a
            cluster on this machine if there is none; ``local`` always starts a cluster; any other value is the address
            of a cluster.

    Raises:
        ImportError: Ray is not installed.
        ConfigError: no cluster answers at the address.
    """
    ray = import_extra("a Ray cluster", "ray", "ray")
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", address)
    if address not in ("auto", "local"):
        _require_answer(address)
    if ray.is_initialized():  # a notebook or driver script that has joined one
        yield ray
        return
    try:
        if address == "local" or (address == "auto" and not _finds_cluster(ray)):
            ray.init(address="local", include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, **QUIET)
        elif address != "auto":
            ray.init(address=address, **QUIET)
    except Exception as error:  # Ray raises bare ones, as where a busy machine starts its processes too slowly
        raise ConfigError(f"--ray {address}: no Ray cluster can be joined: {error}") from error
    with cleaned_up(ray.shutdown):
        yield ray


def _require_answer(address: str) -> None:
    """Raise ConfigError where nothing listens at ``HOST:PORT``; Ray itself would wait for minutes."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit():
        raise ConfigError(
            f"--ray {address}: expected auto, local or HOST:PORT, the address that `ray start --head` prints; start "
            "this command on a machine of the cluster"
        )
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER_WITHIN_S).close()
    except OSError as error:
        raise ConfigError(f"--ray {address}: no Ray cluster answers there ({error}); is `ray start` running?") from None


def _finds_cluster(ray: Any) -> bool:
    try:
        ray.init(address="auto", **QUIET)
    except ConnectionError:
        return False
    return True


def list_nodes(ray: Any) -> list[Node]:
    """Return the living nodes of the cluster."""
    return [
        Node(
            node["NodeID"],
            node["NodeManagerAddress"],
            float(node["Resources"].get("CPU", 0)),
            float(node["Resources"].get("GPU", 0)),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def shorten(error: object) -> str:
    """Return Ray's error message in one line of at most ``SHOWN`` characters."""
    return " ".join(str(error).split())[:SHOWN]


@dataclass(frozen=True)
class Room:
    """The part of a cluster that is reserved for a run.

    Attributes:
        group: Ray's placement group.
        placements: the placements of the ranks.
        servers: the placements of the engines and of the reference.
        resources: the resources of each bundle, by Ray's names.
        placement: ``placements`` and ``servers`` in words.
    """

    group: Any
    placements: list[Placement]
    servers: list[Placement]
    resources: list[dict[str, float]]
    placement: str

    def schedule(self, bundle: int) -> Any:
        """Return Ray's scheduling strategy that puts a process in the bundle."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=bundle)

    def make_options(self, placement: Placement) -> dict[str, Any]:
        """Return Ray's options for the actor of a process: its name, its resources and its bundle."""
        resources = self.resources[placement.bundle]
        return {
            "name": f"rlox-grpo {placement.name}",
            "num_cpus": resources["CPU"],
            "num_gpus": resources.get("GPU", 0),
            "scheduling_strategy": self.schedule(placement.bundle),
        }


@contextmanager
def reserved_room(ray: Any, sizes: Sizes) -> Iterator[Room]:
    """Reserve room for the processes of a run for the block, on as few nodes as possible.

    Raises:
        ConfigError: the cluster cannot hold them, or something else uses the room; the message contains the numbers.
    """
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

    nodes = list_nodes(ray)
    needs = sizes.list_needs(nodes)
    require_room(nodes, needs)
    resources = [need.resources for need in needs for _ in range(need.count)]
    group = placement_group(resources, strategy="PACK")
    with cleaned_up(partial(remove_placement_group, group)):
        if not group.wait(ROOM_WITHIN_S):
            free = ray.available_resources()
            raise ConfigError(
                f"[layout] {list_counts(needs)}: the cluster could hold them; "
                f"after {ROOM_WITHIN_S:g} s only {free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs are free. "
                "Wait for the other jobs, or set less"
            )
        table = placement_group_table(group)["bundles_to_node_id"]
        bundle_nodes = {int(bundle): node for bundle, node in table.items()}
        placements = plan_placements(bundle_nodes, nodes, needs)
        ranks, servers = placements[: sizes.trainers], placements[sizes.trainers :]
        yield Room(group, ranks, servers, resources, describe(placements, needs))
