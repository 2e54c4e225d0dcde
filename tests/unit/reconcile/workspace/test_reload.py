"""Newer code for gangs that live, pods that stand by for it, and workspaces that others lend to."""

import json
from typing import Any

import pytest
from msgspec.structs import replace

from torchrun_api import names
from torchrun_api.core import ClaimSpec, ClaimStatus, PersistentVolumeClaim, Pod
from torchrun_api.kinds import CLAIMS, JOBS, PODS
from torchrun_api.meta import ChildLabels, ChildMeta
from world import START, ZIP, World, make_job, make_queue

TOKEN = "e" * 64


def annotate(world: World, **values: str) -> None:
    added = {f"torchrun.ai/{key.replace('_', '-')}": value for key, value in values.items()}
    meta = world.job.metadata
    world.job = replace(world.job, metadata=replace(meta, annotations=meta.annotations | added))


def made(world: World, revision: int, sha256: str) -> None:
    """The last sync pod ends well."""
    pod = world.observed().workspace.sync_pods[-1].metadata.name
    message = json.dumps({"sha256": sha256, "files": 1, "bytes": 1, "revision": revision})
    world.end_container(pod, names.SYNC_CONTAINER, message=message, finished_at=world.now)
    world.pod(pod, phase="Succeeded")


def running(**spec: Any) -> World:
    world = World(make_job(numNodes=2, volumes=ZIP, **spec), make_queue())
    annotate(world, workspace_sha256="a" * 64, upload_token_sha256=TOKEN)
    world.settle()
    made(world, 1, "a" * 64)
    world.settle()
    world.all_workers("Running")
    world.settle()
    return world


def body(world: World, kind: Any, name: str) -> Any:
    applies = [apply for plan in world.plans for apply in plan.applies]
    return next(a.body for a in reversed(applies) if a.kind is kind and a.name == name)


def variables(pod: Any) -> dict[str, str]:
    return {v["name"]: v.get("value", "") for v in pod["containers"][0]["env"]}


def syncing(world: World) -> list[str]:
    return [pod.metadata.name for pod in world.observed().workspace.sync_pods]


def revisions(world: World) -> set[str]:
    return {pod.metadata.annotations.revision for pod in world.workers()}


def test_a_gang_begins_with_the_revision_that_is_there() -> None:
    world = running(podTemplate={"spec": {"containers": [{"name": "sidecar", "image": "x"}]}})
    template = body(world, JOBS, "train")["spec"]["template"]
    assert template["metadata"]["annotations"][names.REVISION] == "1"
    by_name = {container["name"]: container for container in template["spec"]["containers"]}
    begins = {"name": "TORCHRUN_WORKSPACE_REVISION", "value": "1"}
    assert begins in by_name["trainer"]["env"]
    assert "env" not in by_name["sidecar"]
    assert world.job.status.workspace_revision == 1


def test_newer_code_comes_where_the_queue_is_gone() -> None:
    world = running()
    world.queue = None
    annotate(world, workspace_sha256="b" * 64)
    world.settle()
    assert syncing(world) == ["train-sync-0", "train-sync-1"]
    assert "nodeSelector" not in body(world, PODS, "train-sync-1")["spec"]


def test_newer_code_reaches_the_workers_that_live() -> None:
    world = running()
    annotate(world, workspace_sha256="b" * 64)
    world.settle()
    assert syncing(world) == ["train-sync-0", "train-sync-1"]
    pod = body(world, PODS, "train-sync-1")
    assert variables(pod["spec"])["TORCHRUN_SYNC_SHA256"] == "b" * 64
    assert (world.phase, revisions(world)) == ("Running", {"1"})
    made(world, 2, "b" * 64)
    uids = {pod.metadata.uid for pod in world.workers()}
    world.settle()
    assert revisions(world) == {"2"}
    assert {pod.metadata.annotations.start for pod in world.workers()} == {"0"}
    assert uids == {pod.metadata.uid for pod in world.workers()}
    status = world.job.status
    assert (status.workspace_revision, status.restarts, status.attempt) == (2, 0, 0)


def test_newer_code_is_told_twice_as_the_kubelet_may_miss_it_once() -> None:
    world = running()
    annotate(world, workspace_sha256="b" * 64)
    world.settle()
    made(world, 2, "b" * 64)
    before = {pod.metadata.uid: pod.metadata.annotations for pod in world.workers()}
    world.settle()
    once = {pod.metadata.uid: pod.metadata.annotations for pod in world.workers()}
    world.settle_twice()
    twice = {pod.metadata.uid: pod.metadata.annotations for pod in world.workers()}
    for uid, annotations in before.items():
        assert once[uid] == replace(annotations, revision="2", told="2026-01-02T03:04:05Z")
        assert twice[uid] == replace(annotations, revision="2")


def test_a_gang_that_follows_begins_with_the_newest() -> None:
    world = running()
    annotate(world, workspace_sha256="b" * 64)
    world.settle()
    made(world, 2, "b" * 64)
    world.settle()
    world.end_container("train-0-abcde", "trainer", exit_code=1, finished_at=world.now)
    world.settle()
    world.containers_stop()
    world.pass_time(minutes=10)
    world.settle()
    template = body(world, JOBS, "train-r1")["spec"]["template"]
    assert template["metadata"]["annotations"][names.REVISION] == "2"
    assert variables(template["spec"])["TORCHRUN_WORKSPACE_REVISION"] == "2"


def test_not_all_can_change_where_one_has_ended() -> None:
    world = running()
    world.pod("train-0-abcde", phase="Succeeded")
    annotate(world, workspace_sha256="b" * 64)
    world.settle()
    made(world, 2, "b" * 64)
    world.settle()
    assert revisions(world) == {"1"}
    assert world.job.status.workspace_revision == 1
    assert world.condition(names.UP_TO_DATE).reason == "WorkersEnded"


def test_in_development_a_sync_pod_stands_by() -> None:
    world = running(development=True)
    assert syncing(world) == ["train-sync-0", "train-sync-1"]
    pod = body(world, PODS, "train-sync-1")
    assert variables(pod["spec"])["TORCHRUN_SYNC_AFTER"] == "1"
    assert "TORCHRUN_SYNC_SHA256" not in variables(pod["spec"])
    assert {p.metadata.annotations.development for p in world.workers()} == {"true"}
    world.pod("train-sync-1", phase="Running")
    annotate(world, workspace_sha256="b" * 64)
    world.settle()
    assert syncing(world) == ["train-sync-0", "train-sync-1"], "it takes any"
    made(world, 2, "b" * 64)
    world.settle()
    assert revisions(world) == {"2"}
    assert syncing(world)[-1] == "train-sync-2"
    assert variables(body(world, PODS, "train-sync-2")["spec"])["TORCHRUN_SYNC_AFTER"] == "2"
    for number in (3, 4):
        made(world, number, "b" * 64)
        world.settle()
    assert len(syncing(world)) == 3


def test_a_pod_that_stands_by_takes_uploads_by_the_jobs_token_alone() -> None:
    world = running(development=True)
    name = "TORCHRUN_SYNC_UPLOAD_TOKEN_SHA256"
    assert variables(body(world, PODS, "train-sync-1")["spec"])[name] == TOKEN
    world.pod("train-sync-1", phase="Running")
    annotate(world, upload_token_sha256="f" * 64)
    world.settle()
    assert syncing(world) == ["train-sync-0", "train-sync-2"], "who edits the job is heard"
    assert variables(body(world, PODS, "train-sync-2")["spec"])[name] == "f" * 64
    assert revisions(world) == {"1"}
    annotate(world, upload_token_sha256="")
    world.settle()
    assert syncing(world) == ["train-sync-0"], "nobody could upload to it"
    annotate(world, workspace_sha256="b" * 64)
    world.settle()
    pod = body(world, PODS, syncing(world)[-1])
    assert variables(pod["spec"])["TORCHRUN_SYNC_SHA256"] == "b" * 64
    assert name not in variables(pod["spec"])


def test_another_token_and_another_workspace_together_come_to_a_pod_of_their_own() -> None:
    world = running(development=True)
    world.pod("train-sync-1", phase="Running")
    annotate(world, workspace_sha256="b" * 64, upload_token_sha256="f" * 64)
    world.settle()
    pod = world.observed().workspace.sync_pods[-1]
    annotations = pod.metadata.annotations
    assert (annotations.workspace_sha256, annotations.upload_token_sha256) == ("b" * 64, "f" * 64)
    made(world, 2, "b" * 64)
    world.settle()
    assert revisions(world) == {"2"}


def test_what_the_plugin_saw_made_is_told_before_its_pod_has_ended() -> None:
    world = running(development=True)
    world.pod("train-sync-1", phase="Running")
    annotate(world, workspace_sha256="b" * 64, workspace_revision="7")
    world.settle()
    assert revisions(world) == {"1"}, "nobody can have made that"
    annotate(world, workspace_revision="2")
    world.settle()
    assert (revisions(world), syncing(world)[-1]) == ({"2"}, "train-sync-1")
    made(world, 2, "b" * 64)
    world.settle()
    assert (revisions(world), syncing(world)[-1]) == ({"2"}, "train-sync-2")
    assert variables(body(world, PODS, "train-sync-2")["spec"])["TORCHRUN_SYNC_AFTER"] == "2"


def test_a_pod_that_stands_by_is_in_nobodys_way() -> None:
    world = running(development=True)
    world.pod("train-sync-1", phase="Running")
    world.end_container("train-0-abcde", "trainer", exit_code=1, finished_at=world.now)
    world.settle()
    world.containers_stop()
    world.pass_time(minutes=10)
    world.settle()
    assert world.observed().gang.child_jobs[-1].metadata.name == "train-r1"
    world.spec(development=False)
    world.all_workers("Running")
    world.settle()
    assert syncing(world) == ["train-sync-0"]
    assert {p.metadata.annotations.development for p in world.workers()} == {""}


def test_pods_that_stand_by_and_fail_are_made_again_with_delays() -> None:
    world = running(development=True)
    world.end_container("train-sync-1", "sync", exit_code=1, finished_at=world.now)
    plan = world.settle()
    assert plan.requeue_after == 20
    assert syncing(world)[-1] == "train-sync-1"
    world.pass_time(seconds=20)
    world.settle()
    assert syncing(world)[-1] == "train-sync-2"


def test_without_its_claim_there_is_nothing_to_sync() -> None:
    world = running(development=True)
    before = syncing(world)
    world.objects.pop((CLAIMS.plural, "train-workspace"))
    annotate(world, workspace_sha256="b" * 64)
    world.settle()
    assert syncing(world) == before


def test_sync_pods_removed_by_hand_leave_the_revision_known() -> None:
    world = running(development=True)
    for name in syncing(world):
        world.objects.pop((PODS.plural, name))
    world.settle()
    assert syncing(world) == ["train-sync-0"]
    made(world, 1, "a" * 64)
    world.settle()
    assert syncing(world) == ["train-sync-0", "train-sync-1"]
    assert variables(body(world, PODS, "train-sync-1")["spec"])["TORCHRUN_SYNC_AFTER"] == "1"


def lent(mode: str = "ReadWriteMany", phase: Any = "Bound", **meta: Any) -> PersistentVolumeClaim:
    labels = ChildLabels(torchrun_job="before", component="workspace")
    named = ChildMeta(name="before-workspace", namespace="ml", labels=labels)
    return PersistentVolumeClaim(
        metadata=replace(named, **meta),
        spec=ClaimSpec(access_modes=(mode,)),
        status=ClaimStatus(phase=phase),
    )


def with_base(base: PersistentVolumeClaim | None, *, in_use: bool = False) -> World:
    world = World(make_job(numNodes=1, volumes=ZIP), make_queue())
    annotate(world, workspace_base="before")
    if base is not None:
        world.objects[CLAIMS.plural, base.metadata.name] = base
    if in_use:
        labels = ChildLabels(torchrun_job="before", component=names.WORKER)
        meta = ChildMeta(name="before-0-abcde", namespace="ml", labels=labels)
        world.objects[PODS.plural, meta.name] = Pod(metadata=meta)
    world.settle()
    return world


@pytest.mark.parametrize(
    ("base", "in_use", "used"),
    [
        (lent(), False, True),
        (lent(), True, True),
        (lent("ReadWriteOnce"), False, True),
        (lent("ReadWriteOnce"), True, False),
        (lent(phase="Pending"), False, False),
        (None, False, False),
    ],
)
def test_a_base_is_mounted_where_it_can_be(
    base: PersistentVolumeClaim | None, in_use: bool, used: bool
) -> None:
    pod = body(with_base(base, in_use=in_use), PODS, "train-sync-0")["spec"]
    claims = [v["persistentVolumeClaim"] for v in pod["volumes"] if "persistentVolumeClaim" in v]
    assert ({"claimName": "before-workspace", "readOnly": True} in claims) == used
    assert ("TORCHRUN_SYNC_BASE" in variables(pod)) == used


def test_a_claim_that_goes_or_is_no_workspace_is_no_base() -> None:
    checkpoints = ChildLabels(torchrun_job="before", component="checkpoints")
    for base in (lent(deletion_timestamp=START), lent(labels=checkpoints)):
        pod = body(with_base(base), PODS, "train-sync-0")["spec"]
        assert "TORCHRUN_SYNC_BASE" not in variables(pod)


def test_a_pod_that_does_not_start_with_its_base_is_made_without() -> None:
    world = with_base(lent())
    assert world.settle().requeue_after == 20
    world.pass_time(seconds=20)
    world.settle()
    assert syncing(world) == ["train-sync-0"]
    assert "TORCHRUN_SYNC_BASE" not in variables(body(world, PODS, "train-sync-0")["spec"])
    assert world.settle().requeue_after is None
