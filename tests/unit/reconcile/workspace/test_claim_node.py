"""Sync and setup pods of a workspace PVC that one node can mount: they run where workers use it."""

import json
from typing import Any

import pytest

from torchrun_api import names
from torchrun_api.kinds import PODS
from world import ZIP, World, make_job, make_queue

DIGEST, TOKEN = "a" * 64, "e" * 64
GPU_NODES = {"scheduling": {"nodeSelector": {"gpu": "h100"}}}


def revision_complete(world: World, revision: int, sha256: str = DIGEST) -> None:
    """The last sync pod succeeds."""
    pod = world.observed().workspace.sync_pods[-1].metadata.name
    message = json.dumps({"sha256": sha256, "revision": revision})
    world.end_container(pod, names.SYNC_CONTAINER, message=message, finished_at=world.now)
    world.pod(pod, phase="Succeeded")
    world.settle()


def synced(nodes: int = 1, mode: str | None = None, **spec: Any) -> World:
    """A job in development whose workspace is complete; the gang has no nodes yet."""
    workspace = {"source": "zip", **({} if mode is None else {"accessMode": mode})}
    annotations = {names.WORKSPACE_SHA256: DIGEST, names.UPLOAD_TOKEN_SHA256: TOKEN}
    settings = {"numNodes": nodes, "volumes": {"workspace": workspace}, "development": True}
    job = make_job(annotations_=annotations, **{**settings, **spec})
    world = World(job, make_queue(**GPU_NODES))
    for node in ("node-1", "node-2"):
        world.node(node)
    world.settle()
    world.claim_is("Bound")
    revision_complete(world, 1)
    return world


def pod_spec(world: World, name: str) -> Any:
    applies = [apply for plan in world.plans for apply in plan.applies]
    bodies = [a.body for a in applies if a.kind is PODS and a.name == name]
    return bodies[-1]["spec"]


def sync_pods(world: World) -> list[str]:
    pods = world.observed().workspace.sync_pods
    return [p.metadata.name for p in pods if p.status.phase != "Succeeded"]


@pytest.mark.parametrize(("nodes", "mode"), [(2, None), (1, "ReadWriteMany")])
def test_a_pod_with_a_shared_claim_runs_on_any_node(nodes: int, mode: str | None) -> None:
    world = synced(nodes, mode)
    world.all_workers("Running")
    world.settle()
    assert sync_pods(world) == ["train-sync-1"]
    for name in ("train-sync-0", "train-sync-1"):
        assert {"nodeSelector", "affinity"}.isdisjoint(pod_spec(world, name))


def test_the_mode_of_a_claim_that_exists_counts_not_that_of_the_queue() -> None:
    world = World(make_job(numNodes=2, volumes=ZIP), make_queue(**GPU_NODES))
    world.settle()
    workspace = {"workspace": {"accessMode": "ReadWriteOnce"}}
    world.queue = make_queue(**GPU_NODES, storage=workspace)
    world.vanish("train-sync-0")
    world.settle()
    assert "nodeSelector" not in pod_spec(world, "train-sync-0")
