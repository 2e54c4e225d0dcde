"""Nodes and pods as kwok plays them."""

from contextlib import AbstractContextManager
from pathlib import Path

import msgspec

from torchrun_bench.processes import running
from torchrun_cluster import LocalCluster, binaries

STAGES = Path(__file__).with_name("kwok.yaml")
NODES = 16


def playing(on: LocalCluster) -> AbstractContextManager[object]:
    """NODES nodes whose pods run at once."""
    node = {"apiVersion": "v1", "kind": "Node"}
    nodes = [{**node, "metadata": {"name": f"node-{number}"}} for number in range(NODES)]
    listed = {"apiVersion": "v1", "kind": "List", "items": nodes}
    on.kubectl("apply", "-f", "-", stdin=msgspec.json.encode(listed).decode())
    program = binaries.ensure(["kwok"])["kwok"]
    files = ["--kubeconfig", str(on.kubeconfig), "--config", str(STAGES)]
    # Above ERROR: that the Job controller was first to remove a pod is no news.
    return running([str(program), "--manage-all-nodes", "-v", "12", *files])
