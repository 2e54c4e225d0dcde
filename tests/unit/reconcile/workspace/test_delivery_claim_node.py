"""Sync and setup pods of a workspace PVC that one node can mount: they run where workers use it."""

import json
from typing import Any

import pytest
from msgspec.structs import replace

from torchrun_api import names
from torchrun_api.kinds.resources import JOBS, PODS
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


def annotate(world: World, **values: str) -> None:
    added = {f"torchrun.ai/{key.replace('_', '-')}": value for key, value in values.items()}
    meta = world.job.metadata
    world.job = replace(world.job, metadata=replace(meta, annotations=meta.annotations | added))


def required_node(world: World, name: str) -> str | None:
    """The node on which the pod has to run, wherever workers may run."""
    spec = pod_spec(world, name)
    if "affinity" not in spec:
        return None
    required = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    ((term,),) = (each["matchFields"] for each in required["nodeSelectorTerms"])
    assert (term["key"], term["operator"], "nodeSelector" in spec) == (
        "metadata.name",
        "In",
        False,
    )
    return str(*term["values"])


def running(node: str = "node-1", **spec: Any) -> World:
    """A gang of one node with a ReadWriteOnce PVC."""
    world = synced(**spec)
    place_worker(world, node)
    world.settle()
    return world


def place_worker(world: World, node: str) -> None:
    (worker,) = world.workers()
    world.place(worker.metadata.name, node)
    world.pod(worker.metadata.name, phase="Running")


def preempt_worker(world: World) -> None:
    """The worker fails, and the next gang has no node yet."""
    (worker,) = world.workers()
    world.pod(worker.metadata.name, phase="Failed", reason="Preempted")
    world.settle()
    world.pass_time(minutes=10)
    world.settle()
    assert (JOBS.plural, "train-r1") in world.created
    assert not world.workers()[0].spec.node_name


def test_a_standby_pod_runs_on_the_node_of_the_worker() -> None:
    world = synced()
    assert world.observed().gang.child_jobs
    assert not sync_pods(world), "the worker has no node"
    place_worker(world, "node-2")
    world.settle()
    assert sync_pods(world) == ["train-sync-1"]
    assert required_node(world, "train-sync-1") == "node-2"


def test_newer_code_comes_from_a_pod_on_the_node_of_the_worker() -> None:
    world = running("node-2", development=False)
    assert not sync_pods(world)
    annotate(world, workspace_sha256="b" * 64)
    world.settle()
    assert sync_pods(world) == ["train-sync-1"]
    assert required_node(world, "train-sync-1") == "node-2"


@pytest.mark.parametrize("queue", [make_queue(), None])
def test_the_taints_of_the_node_of_a_worker_do_not_keep_the_pod_away(queue: Any) -> None:
    world = running(development=False)
    world.queue = queue
    annotate(world, workspace_sha256="b" * 64)
    world.settle()
    assert required_node(world, "train-sync-1") == "node-1"
    tolerations = pod_spec(world, "train-sync-1")["tolerations"]
    assert tolerations == [{"operator": "Exists", "effect": "NoSchedule"}]


def test_a_standby_pod_follows_the_worker_to_another_node() -> None:
    world = running()
    world.place("train-sync-1", "node-1")
    world.takes_upload()
    preempt_worker(world)
    assert sync_pods(world) == ["train-sync-1"], "the next worker may get the same node"
    place_worker(world, "node-2")
    world.settle()
    assert sync_pods(world) == ["train-sync-2"]
    assert required_node(world, "train-sync-2") == "node-2"


def test_a_standby_pod_without_a_node_waits_for_the_worker_again() -> None:
    world = running()
    preempt_worker(world)
    assert not sync_pods(world)
    place_worker(world, "node-2")
    world.settle()
    assert required_node(world, sync_pods(world)[-1]) == "node-2"


def test_a_standby_pod_stays_with_a_worker_that_returns_to_the_node() -> None:
    world = running()
    world.place("train-sync-1", "node-1")
    world.takes_upload()
    preempt_worker(world)
    place_worker(world, "node-1")
    world.settle()
    assert sync_pods(world) == ["train-sync-1"]


def test_a_pod_with_an_interrupted_upload_follows_the_worker() -> None:
    world = running(development=False)
    annotate(world, workspace_sha256="b" * 64)
    world.settle()
    world.place("train-sync-1", "node-1")
    world.takes_upload()
    preempt_worker(world)
    assert sync_pods(world) == ["train-sync-1"]
    place_worker(world, "node-2")
    uid = world.observed().workspace.sync_pods[-1].metadata.uid
    plan = world.step()
    assert [delete.uid for delete in plan.deletes] == [uid]
    world.settle()
    assert required_node(world, sync_pods(world)[-1]) == "node-2"


def test_a_pod_does_not_follow_a_worker_on_a_lost_node() -> None:
    world = running(development=False)
    world.node("node-1", False)
    world.pass_time(seconds=41)
    annotate(world, workspace_sha256="b" * 64)
    world.settle()
    assert sync_pods(world)[-1] == "train-sync-1"
    assert required_node(world, "train-sync-1") is None


def test_a_standby_pod_leaves_its_node_for_the_setup_of_the_next_gang() -> None:
    world = synced(setupCommand="make")
    world.setup_done()
    world.settle()
    place_worker(world, "node-1")
    world.settle()
    world.place("train-sync-1", "node-1")
    world.takes_upload()
    (worker,) = world.workers()
    world.pod(worker.metadata.name, phase="Failed", reason="Preempted")
    world.spec(setup_command="make all")
    world.settle()
    world.pass_time(minutes=10)
    world.settle()
    assert (world.phase, world.job.status.reason) == ("Syncing", "SetupRunning")
    assert sync_pods(world) == ["train-sync-1"]
    world.place("train-setup-1", "node-2")
    world.settle()
    assert not sync_pods(world)
    world.setup_done()
    world.settle()
    assert (JOBS.plural, "train-r1") in world.created


def test_no_pod_stands_by_for_a_claim_that_one_pod_can_mount() -> None:
    world = synced(mode="ReadWriteOncePod")
    place_worker(world, "node-1")
    world.settle()
    assert world.phase == "Running"
    assert not sync_pods(world), "it would keep the next worker from its PVC"
