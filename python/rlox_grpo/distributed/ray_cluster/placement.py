"""Which rank runs on which node, with which devices. Pure functions: Ray decides the nodes, this numbers the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlox_grpo.errors import ConfigError


@dataclass(frozen=True)
class Node:
    """One node of a Ray cluster.

    Attributes:
        id: Ray's id, hexadecimal.
        address: its IP address.
        cpus, gpus: what it offers to Ray in all, used or not.
    """

    id: str
    address: str
    cpus: float
    gpus: float


@dataclass(frozen=True)
class Trainers:
    """What the training ranks of a run need.

    Attributes:
        count: ranks.
        cpus, gpus: of each rank.
    """

    count: int
    cpus: float
    gpus: float

    def fit_on(self, node: Node) -> int:
        """How many of the ranks an empty node holds."""
        counts = [int(node.cpus // self.cpus)] + ([int(node.gpus // self.gpus)] if self.gpus else [])
        return min(self.count, *counts)


@dataclass(frozen=True)
class Place:
    """Where one rank runs.

    Attributes:
        rank: 0 to ``world_size`` − 1.
        bundle: its bundle in Ray's placement group.
        node: its node.
        local_rank, local_size: its number among the ranks of its node, and how many they are.
        node_rank: number of the node among the nodes of the run.
    """

    rank: int
    bundle: int
    node: Node
    local_rank: int
    local_size: int
    node_rank: int


def require_room(nodes: Sequence[Node], trainers: Trainers) -> None:
    """Raise ConfigError, with the numbers, where the whole cluster cannot hold the ranks even if nothing else ran."""
    room = {node: trainers.fit_on(node) for node in nodes}
    if sum(room.values()) >= trainers.count:
        return
    held = ", ".join(
        f"{node.address} with {_amount(node.cpus, node.gpus)} holds {count}" for node, count in room.items()
    )
    raise ConfigError(
        f"[layout] trainers={trainers.count}: each needs {_amount(trainers.cpus, trainers.gpus)}; the cluster holds "
        f"{sum(room.values())} of them ({held or 'it has no node'}); add nodes, or set trainers to what fits"
    )


def number_ranks(node_of_bundle: Mapping[int, str], nodes: Sequence[Node]) -> list[Place]:
    """Number the bundles of a placement group: the ranks of a node follow each other.

    Args:
        node_of_bundle: bundle → id of the node that Ray gave it.
        nodes: of the cluster.
    """
    by_id = {node.id: node for node in nodes}
    bundles: dict[str, list[int]] = {}
    for bundle, node_id in sorted(node_of_bundle.items()):
        bundles.setdefault(node_id, []).append(bundle)
    places: list[Place] = []
    for node_rank, (node_id, own) in enumerate(bundles.items()):
        for local_rank, bundle in enumerate(own):
            places.append(Place(len(places), bundle, by_id[node_id], local_rank, len(own), node_rank))
    return places


def describe(places: Sequence[Place], trainers: Trainers) -> str:
    """The placement in words, a line for each node."""
    nodes = {place.node: [other.rank for other in places if other.node == place.node] for place in places}
    lines = [f"{len(places)} trainers on {len(nodes)} of the cluster's nodes:"]
    for node, ranks in nodes.items():
        used = _amount(trainers.cpus * len(ranks), trainers.gpus * len(ranks))
        lines.append(
            f"  {node.address} (node {node.id[:8]}): {'rank' if len(ranks) == 1 else 'ranks'} "
            f"{', '.join(map(str, ranks))}; {used} of {_amount(node.cpus, node.gpus)}"
        )
    return "\n".join(lines)


def make_rank_variables(place: Place, places: Sequence[Place], master: tuple[str, int], run_id: str) -> dict[str, str]:
    """The environment variables that torchrun gives to a rank.

    Args:
        place: of the rank.
        places: of all ranks.
        master: address and port of the store, which rank 0's actor holds, as torchrun's agent does.
        run_id: any text that names this start.
    """
    return {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(len(places)),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_size),
        "GROUP_RANK": str(place.node_rank),
        "GROUP_WORLD_SIZE": str(len({other.node_rank for other in places})),
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": run_id,
    }


def _amount(cpus: float, gpus: float) -> str:
    def count(value: float, name: str) -> str:
        return f"{value:g} {name}{'' if value == 1 else 's'}"

    return f"{count(cpus, 'CPU')} and {count(gpus, 'GPU')}"
