"""Two gangs with room for one of them, on real nodes."""

import json

from e2e.cluster import Cluster
from e2e.gpus import ROLE
from e2e.history import History
from e2e.manifests import job, queue
from e2e.ranks import ROUNDS, kill_rank, pod_of
from e2e.space import Space
from torchrun_api import names
from torchrun_api.json import JsonObject
from torchrun_api.kinds.quantity import parse
from torchrun_api.kinds.resources import PODS

NODES = 2


def apply_queue(space: Space, scheduling: JsonObject) -> None:
    """Apply the queue `real`, of which no node has room for two workers."""
    resources = _more_than_half_a_node(space.cluster)
    image = space.cluster.controller
    space.apply(queue("real", image, nodeResources=resources, scheduling=scheduling))


def _more_than_half_a_node(cluster: Cluster) -> JsonObject:
    real = ("-l", f"!{ROLE}", "-o", "json")
    listed = json.loads(cluster.kubectl("get", "nodes", *real).stdout)["items"]
    cpus = max(parse(node["status"]["allocatable"]["cpu"]) for node in listed)
    return {"cpus": f"{int(cpus * 600)}m", "memory": "128Mi"}


def assert_a_restart_in_place_keeps_the_nodes(space: Space, queue_name: str, waits: str) -> None:
    """Check that a gang which waits with the reason `waits` gets no node before the first succeeds.

    A rank of the first gang fails meanwhile, and the ranks restart in the same pods.
    """
    with space.history(PODS) as pods:
        space.apply(job("holder", queue_name, ROUNDS, NODES))
        space.wait_phase("holder", "Running")
        space.apply(job("rival", queue_name, ["python3", "-c", "pass"], NODES))
        space.wait_reason("rival", waits)
        workers = {pod_of(space, "holder", index) for index in range(NODES)}
        kill_rank(space, min(workers))
        status = space.wait_phase("holder", "Succeeded")
        space.wait_phase("rival", "Succeeded")
        _assert_no_node_before_success(pods, "rival", "holder")
        placed = _nodes(pods, "holder")
    assert (status.get("attempt", 0), status["restarts"], status["restartsInPlace"]) == (0, 1, 1)
    assert set(placed) == workers
    assert all(len(nodes) == 1 for nodes in placed.values()), placed


def _assert_no_node_before_success(pods: History, waiting: str, running: str) -> None:
    """Check that no pod of `waiting` is bound before the first pod of `running` succeeds.

    Pods of a gang succeed one after another, and the node of the first is free at once.
    """
    for state in pods.states():
        name, job = state["metadata"]["name"], state["metadata"]["labels"].get(names.JOB_LABEL)
        if job == running and state["status"].get("phase") == "Succeeded":
            return
        assert job != waiting or not state["spec"].get("nodeName"), f"{name} has a node too early"
    raise AssertionError(f"no pod of {running} has succeeded")


def _nodes(pods: History, job: str) -> dict[str, set[str]]:
    """All nodes that each pod of a job was ever bound to, by the pod's name."""
    placed: dict[str, set[str]] = {}
    for state in pods.states():
        meta = state["metadata"]
        if meta["labels"].get(names.JOB_LABEL) == job:
            node = state["spec"].get("nodeName")
            placed.setdefault(meta["name"], set()).update({node} if node else ())
    return placed
