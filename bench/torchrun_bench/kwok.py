"""Nodes and pods of kwok."""

from contextlib import AbstractContextManager
from pathlib import Path

import msgspec

from torchrun_bench.processes import running
from torchrun_cluster import LocalCluster, binaries

STAGES = Path(__file__).with_name("kwok.yaml")
NODES = 16


def playing(on: LocalCluster, count: int = NODES) -> AbstractContextManager[object]:
    """Run nodes whose pods run at once."""
    node = {"apiVersion": "v1", "kind": "Node"}
    nodes = [{**node, "metadata": {"name": f"node-{number}"}} for number in range(count)]
    listed = {"apiVersion": "v1", "kind": "List", "items": nodes}
    on.kubectl("apply", "-f", "-", stdin=msgspec.json.encode(listed).decode())
    program = binaries.ensure(["kwok"])["kwok"]
    files = ["--kubeconfig", str(on.kubeconfig), "--config", str(STAGES)]
    # Without leases, the node lifecycle controller sets each node NotReady after 50 s.
    leases = ["--node-lease-duration-seconds", "40"]
    # Above ERROR, because kwok logs an error if the Job controller deletes a pod first.
    return running([str(program), "--manage-all-nodes", "-v", "12", *leases, *files])
