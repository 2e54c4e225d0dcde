"""Several nodes: where the workers of a job run, and what can happen to a node."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from e2e.space import Space
from torchrun_api import names
from torchrun_api.json import JsonObject, JsonValue
from torchrun_api.kinds.resources import PODS
from torchrun_cluster import LocalCluster

HOSTNAME = "kubernetes.io/hostname"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
INDEX = "batch.kubernetes.io/job-completion-index"


def apart(*nodes: str) -> JsonObject:
    """A podTemplate for workers that never share a node, and that run on `nodes` if there are any."""
    workers: JsonObject = {"matchLabels": {names.COMPONENT_LABEL: names.WORKER}}
    rule: JsonObject = {"topologyKey": HOSTNAME, "labelSelector": workers}
    affinity: dict[str, JsonValue] = {"podAntiAffinity": {REQUIRED: [rule]}}
    if nodes:
        term: JsonObject = {"key": HOSTNAME, "operator": "In", "values": list(nodes)}
        affinity["nodeAffinity"] = {REQUIRED: {"nodeSelectorTerms": [{"matchExpressions": [term]}]}}
    return {"spec": {"affinity": affinity}}


def placed(space: Space, job: str, attempt: int = 0) -> dict[int, str]:
    """The nodes of the workers of an attempt, by index."""
    labels = {
        names.JOB_LABEL: job,
        names.COMPONENT_LABEL: names.WORKER,
        names.ATTEMPT_LABEL: str(attempt),
    }
    selector = ",".join(f"{key}={value}" for key, value in labels.items())
    pods = space.api.get(PODS.path(space.name), params={"labelSelector": selector}).json()["items"]
    return {int(pod["metadata"]["labels"][INDEX]): pod["spec"].get("nodeName", "") for pod in pods}


def one_to_lose(local: LocalCluster, nodes: dict[int, str]) -> tuple[int, str]:
    """Index and node of a worker that is not on the node of the control plane."""
    first = local.nodes[0].name
    return next((index, node) for index, node in nodes.items() if node != first)


@contextmanager
def silent(local: LocalCluster, name: str, cause: str) -> Iterator[None]:
    """By "kubelet" or "network": no heartbeat of the node reaches the API server until the end of the block."""
    if cause == "network":
        with cut(local, name, local.nodes[0].name):
            yield
    else:
        local.stop(f"{cause}@{name}")
        try:
            yield
        finally:
            local.start(f"{cause}@{name}")


@contextmanager
def cut(local: LocalCluster, one: str, other: str) -> Iterator[None]:
    """Drop all packets between two nodes and their pods until the end of the block."""
    by_name = {node.name: node for node in local.nodes}
    pairs = ((by_name[one], by_name[other]), (by_name[other], by_name[one]))

    def each(action: str) -> None:
        for here, there in pairs:
            rule = ("PREROUTING", "--source", there.pods, "--jump", "DROP")
            command = ("iptables", "--table", "raw", action, *rule)
            subprocess.run([*local.inside(here.name), *command], check=True)

    each("--append")
    try:
        yield
    finally:
        each("--delete")
