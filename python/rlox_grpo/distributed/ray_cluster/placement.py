"""Number the processes of a run and describe their placement. Pure functions: Ray chooses the nodes."""

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
        cpus, gpus: its total in Ray, whether used or free.
    """

    id: str
    address: str
    cpus: float
    gpus: float


@dataclass(frozen=True)
class Need:
    """The resources that the processes of one kind need.

    Attributes:
        kind: a key of the ``[layout]`` table: ``trainers``, ``engines`` or ``reference``.
        count: processes.
        cpus, gpus: of each process.
    """

    kind: str
    count: int
    cpus: float
    gpus: float

    def count_on(self, node: Node) -> int:
        """How many of the processes the node holds, at most ``count``."""
        counts = [int(node.cpus // self.cpus)] + ([int(node.gpus // self.gpus)] if self.gpus else [])
        return min(self.count, *counts)

    @property
    def resources(self) -> dict[str, float]:
        """The resources of one process, by Ray's names."""
        return {"CPU": self.cpus, **({"GPU": self.gpus} if self.gpus else {})}


@dataclass(frozen=True)
class Sizes:
    """The processes of a run on a Ray cluster.

    Attributes:
        trainers, cpus_per_trainer: training ranks, and the CPUs of each.
        engines, cpus_per_engine, gpus_per_engine: generation engines apart from the ranks.
        references: 1 for a reference policy in a process of its own, else 0.
    """

    trainers: int = 1
    cpus_per_trainer: int = 1
    engines: int = 0
    cpus_per_engine: int = 1
    gpus_per_engine: int = 1
    references: int = 0

    def list_needs(self, nodes: Sequence[Node]) -> list[Need]:
        """List the needs, trainers first. In a cluster without a GPU all processes run on CPUs."""
        has_gpus = any(node.gpus for node in nodes)
        needs = [
            Need("trainers", self.trainers, self.cpus_per_trainer, float(has_gpus)),
            Need("engines", self.engines, self.cpus_per_engine, float(self.gpus_per_engine * has_gpus)),
            Need("reference", self.references, 1.0, float(has_gpus)),
        ]
        return [need for need in needs if need.count]


@dataclass(frozen=True)
class Place:
    """Where one rank runs.

    Attributes:
        rank: 0 to ``world_size`` − 1.
        bundle: its bundle in Ray's placement group.
        node: its node.
        local_rank, local_size: its number among the ranks of its node, and the number of ranks there.
        node_rank: number of the node among the nodes of the run.
    """

    rank: int
    bundle: int
    node: Node
    local_rank: int
    local_size: int
    node_rank: int


@dataclass(frozen=True)
class ServerPlace:
    """Where an engine or the reference runs.

    Attributes:
        kind: ``engines`` or ``reference``.
        index: its number among those of its kind.
        bundle: its bundle in Ray's placement group.
        node: its node.
    """

    kind: str
    index: int
    bundle: int
    node: Node


def require_room(nodes: Sequence[Node], needs: Sequence[Need]) -> None:
    """Raise ConfigError, with the numbers, if the cluster cannot hold the processes even when it is idle.

    Checks each kind by itself, and the sums of all kinds. Ray finds out whether they fit beside each other.
    """
    for need in needs:
        room = {node: need.count_on(node) for node in nodes}
        if sum(room.values()) < need.count:
            held = ", ".join(
                f"{node.address} with {_amount(node.cpus, node.gpus)} holds {count}" for node, count in room.items()
            )
            raise ConfigError(
                f"[layout] {need.kind}={need.count}: each needs {_amount(need.cpus, need.gpus)}; the cluster holds "
                f"{sum(room.values())} of them ({held or 'it has no node'}); add nodes, or set {need.kind} to what fits"
            )
    wanted = _amount(sum(need.count * need.cpus for need in needs), sum(need.count * need.gpus for need in needs))
    cpus, gpus = sum(node.cpus for node in nodes), sum(node.gpus for node in nodes)
    if sum(need.count * need.cpus for need in needs) > cpus or sum(need.count * need.gpus for need in needs) > gpus:
        raise ConfigError(
            f"[layout] {list_counts(needs)}: together they need {wanted}; the cluster has {_amount(cpus, gpus)}: add "
            "nodes, or set less"
        )


def list_counts(needs: Sequence[Need]) -> str:
    """``trainers=2, engines=1``, as in the ``[layout]`` table."""
    return ", ".join(f"{need.kind}={need.count}" for need in needs)


def place_servers(
    node_of_bundle: Mapping[int, str], nodes: Sequence[Node], needs: Sequence[Need], first: int
) -> list[ServerPlace]:
    """Number the engines and the reference. ``first`` is their first bundle, after those of the ranks."""
    by_id = {node.id: node for node in nodes}
    kinds = [(need.kind, index) for need in needs if need.kind != "trainers" for index in range(need.count)]
    return [
        ServerPlace(kind, index, bundle, by_id[node_of_bundle[bundle]])
        for bundle, (kind, index) in enumerate(kinds, first)
    ]


def number_ranks(node_of_bundle: Mapping[int, str], nodes: Sequence[Node]) -> list[Place]:
    """Number the bundles of a placement group: the ranks of a node follow each other.

    Args:
        node_of_bundle: bundle of a rank → id of the node that Ray gave it.
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


def describe(places: Sequence[Place], needs: Sequence[Need], servers: Sequence[ServerPlace] = ()) -> str:
    """The placement in words, a line for each node."""
    by_kind = {need.kind: need for need in needs}
    nodes = list(dict.fromkeys([place.node for place in places] + [place.node for place in servers]))
    counts = ", ".join(f"{need.count} {need.kind}" for need in needs)
    lines = [f"{counts} on {len(nodes)} of the cluster's nodes:"]
    for node in nodes:
        own = [("rank", "trainers", place.rank) for place in places if place.node == node]
        own += [(place.kind.removesuffix("s"), place.kind, place.index) for place in servers if place.node == node]
        used = _amount(sum(by_kind[kind].cpus for _, kind, _ in own), sum(by_kind[kind].gpus for _, kind, _ in own))
        named = []
        for name in dict.fromkeys(name for name, _, _ in own):
            numbers = [str(number) for other, _, number in own if other == name]
            named.append(name if name == "reference" else f"{name}{'s' * (len(numbers) > 1)} {', '.join(numbers)}")
        lines.append(
            f"  {node.address} (node {node.id[:8]}): {'; '.join(named)}; {used} of {_amount(node.cpus, node.gpus)}"
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
