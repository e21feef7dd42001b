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
        address: the node's IP address.
        cpus, gpus: the node's total in Ray, used and free.
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
        count: the number of processes.
        cpus, gpus: what each process needs.
    """

    kind: str
    count: int
    cpus: float
    gpus: float

    def count_on(self, node: Node) -> int:
        """Return how many of the processes fit on the node, at most ``count``."""
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
        references: 1 for a reference policy in a process of its own, otherwise 0.
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
class Placement:
    """Where one process runs.

    Attributes:
        kind: a key of the ``[layout]`` table, as in :class:`Need`.
        index: the process's number among those of its kind; for a trainer, its rank.
        bundle: the process's bundle in Ray's placement group.
        node: the node that the process runs on.
    """

    kind: str
    index: int
    bundle: int
    node: Node

    @property
    def name(self) -> str:
        """``rank 0``, ``engine 0`` or ``the reference``."""
        return "the reference" if self.kind == "reference" else f"{_SINGULAR[self.kind]} {self.index}"

    def __str__(self) -> str:
        """The process and the address of its node."""
        return f"{self.name} on {self.node.address}"

    @property
    def log(self) -> str:
        """File name of the process's log."""
        return self.name.removeprefix("the ").replace(" ", "_") + ".log"


_SINGULAR = {"trainers": "rank", "engines": "engine"}


def require_room(nodes: Sequence[Node], needs: Sequence[Need]) -> None:
    """Raise ConfigError, with the numbers, if the cluster cannot hold the processes even when it is idle.

    The check covers each kind by itself, and the sums of all kinds. Ray finds out whether they fit together.
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
    cpus, gpus = sum(node.cpus for node in nodes), sum(node.gpus for node in nodes)
    cpus_wanted = sum(need.count * need.cpus for need in needs)
    gpus_wanted = sum(need.count * need.gpus for need in needs)
    if cpus_wanted > cpus or gpus_wanted > gpus:
        raise ConfigError(
            f"[layout] {list_counts(needs)}: together they need {_amount(cpus_wanted, gpus_wanted)}; the cluster has "
            f"{_amount(cpus, gpus)}: add nodes, or set less"
        )


def list_counts(needs: Sequence[Need]) -> str:
    """Return text such as ``trainers=2, engines=1``, as in the ``[layout]`` table."""
    return ", ".join(f"{need.kind}={need.count}" for need in needs)


def plan_placements(bundle_nodes: Mapping[int, str], nodes: Sequence[Node], needs: Sequence[Need]) -> list[Placement]:
    """Number the processes, in the order of ``needs``; the ranks of a node follow each other.

    Args:
        bundle_nodes: bundle → id of the node that Ray gave it. The bundles are in the order of ``needs``.
        nodes: the nodes of the cluster.
        needs: what the processes of the run need, by kind.
    """
    by_id = {node.id: node for node in nodes}
    placements: list[Placement] = []
    for need in needs:
        bundles = list(range(len(placements), len(placements) + need.count))
        if need.kind == "trainers":
            node_order = list(dict.fromkeys(bundle_nodes[bundle] for bundle in bundles))
            bundles.sort(key=lambda bundle: node_order.index(bundle_nodes[bundle]))
        for index, bundle in enumerate(bundles):
            placements.append(Placement(need.kind, index, bundle, by_id[bundle_nodes[bundle]]))
    return placements


def describe(placements: Sequence[Placement], needs: Sequence[Need]) -> str:
    """Return the placement in words, with a line for each node."""
    by_kind = {need.kind: need for need in needs}
    nodes = list(dict.fromkeys(placement.node for placement in placements))
    counts = ", ".join(f"{need.count} {need.kind}" for need in needs)
    lines = [f"{counts} on {len(nodes)} of the cluster's nodes:"]
    for node in nodes:
        on_node = [placement for placement in placements if placement.node == node]
        used = _amount(
            sum(by_kind[placement.kind].cpus for placement in on_node),
            sum(by_kind[placement.kind].gpus for placement in on_node),
        )
        named = []
        for kind in dict.fromkeys(placement.kind for placement in on_node):
            numbers = [str(placement.index) for placement in on_node if placement.kind == kind]
            plural = "s" * (len(numbers) > 1)
            named.append(kind if kind == "reference" else f"{_SINGULAR[kind]}{plural} {', '.join(numbers)}")
        lines.append(
            f"  {node.address} (node {node.id[:8]}): {'; '.join(named)}; {used} of {_amount(node.cpus, node.gpus)}"
        )
    return "\n".join(lines)


def make_rank_variables(
    rank: Placement, ranks: Sequence[Placement], master: tuple[str, int], run_id: str
) -> dict[str, str]:
    """Return the environment variables that torchrun gives to a rank.

    Args:
        rank: the placement of this rank.
        ranks: the placements of all ranks.
        master: address and port of the store, which rank 0's actor holds, as torchrun's agent does.
        run_id: any text that names this start.
    """
    nodes = list(dict.fromkeys(other.node for other in ranks))
    on_node = [other for other in ranks if other.node == rank.node]
    return {
        "RANK": str(rank.index),
        "WORLD_SIZE": str(len(ranks)),
        "LOCAL_RANK": str(on_node.index(rank)),
        "LOCAL_WORLD_SIZE": str(len(on_node)),
        "GROUP_RANK": str(nodes.index(rank.node)),
        "GROUP_WORLD_SIZE": str(len(nodes)),
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
