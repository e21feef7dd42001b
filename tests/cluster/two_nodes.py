"""A Ray cluster on this machine until standard input closes; prints its address. Its GPUs are numbers only."""

from __future__ import annotations

import sys

from ray.cluster_utils import Cluster

STORE = 100 * 2**20

if __name__ == "__main__":
    head = {"num_cpus": 2, "num_gpus": 2, "object_store_memory": STORE, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(num_cpus=2, num_gpus=1, object_store_memory=STORE)
    print(cluster.address, flush=True)
    sys.stdin.read()
    cluster.shutdown()
