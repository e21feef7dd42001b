"""A Ray cluster on this machine until standard input closes; prints its address. Its GPUs are numbers only."""

from __future__ import annotations

import socket
import sys

from ray.cluster_utils import Cluster

STORE = 100 * 2**20
AGENTS = ("dashboard_agent_listen_port", "metrics_agent_port", "runtime_env_agent_port", "metrics_export_port")


def named_ports() -> dict[str, int]:
    """Free ports for a node's agents: else the node waits for the agents' Python at most 15 s, too few when busy."""
    sockets = [socket.create_server(("", 0)) for _ in AGENTS]
    found = {name: one.getsockname()[1] for name, one in zip(AGENTS, sockets, strict=True)}
    for one in sockets:
        one.close()
    return found


if __name__ == "__main__":
    node = {"num_cpus": 2, "num_gpus": 2, "object_store_memory": STORE, "include_log_monitor": False}
    head = {**node, **named_ports(), "include_dashboard": False, "no_monitor": True}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(**node, **named_ports())
    print(cluster.address, flush=True)
    sys.stdin.read()
    cluster.shutdown()
