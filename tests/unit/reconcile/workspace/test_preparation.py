"""The workspace: a PVC and the sync pod that fills it before the first gang."""

from datetime import timedelta

import pytest
from msgspec.structs import replace

from torchrun_api import names
from torchrun_api.kinds.core import ContainerStatus
from torchrun_api.kinds.job import Volumes
from torchrun_api.kinds.resources import CLAIMS, JOBS, PODS
from torchrun_api.kinds.workspace import WorkspaceVolume
from torchrun_controller.reconcile.pods.lifecycle import alive
from torchrun_controller.reconcile.workspace.sync_pods import is_current
from world import ZIP, World, make_job, make_queue


def test_a_zip_workspace_is_synced_before_the_gang_exists():
    world = World(make_job(numNodes=2, volumes=ZIP), make_queue())
    world.settle()
    assert world.phase == "Syncing"
    assert world.created == [(CLAIMS.plural, "train-workspace"), (PODS.plural, "train-sync-0")]
    world.takes_upload()
    world.settle()
    assert world.job.status.reason == "WaitingForUpload"
    assert "kubectl torchrun sync train" in world.job.status.message
    world.sync_done()
    world.settle()
    assert world.phase == "Queued"
    assert world.condition("WorkspaceReady").status == "True"
    assert (JOBS.plural, "train") in world.created


def test_an_upload_is_requested_when_the_pod_is_ready():
    world = World(make_job(numNodes=2, volumes=ZIP), make_queue())
    world.settle()
    world.takes_upload(ready=False)
    world.settle()
    assert world.job.status.reason == "SyncPodStarting"
    assert "kubectl torchrun sync" not in world.job.status.message
    world.takes_upload()
    world.settle()
    assert world.job.status.reason == "WaitingForUpload"


TOLERATES = {"tolerations": [{"key": "night", "operator": "Exists"}]}
PLACED = {
    "imagePullSecrets": [{"name": "registry"}],
    "scheduling": {
        "nodeSelector": {"pool": "gpu"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
    },
}


@pytest.mark.parametrize(
    ("nodes", "delivery", "with_workers"),
    [(1, "shared", True), (2, "shared", False), (1, "direct", False)],
)
def test_a_sync_pod_runs_where_its_claim_is_usable(nodes, delivery, with_workers):
    """Anywhere, it has the pull secrets and tolerations of the workers."""
    volumes = {"workspace": {"source": "zip", "delivery": delivery}}
    job = make_job(
        numNodes=nodes, volumes=volumes, scheduling={"nodeSelector": {"zone": "a"}, **TOLERATES}
    )
    (pod,) = (apply.body for apply in World(job, make_queue(**PLACED)).plan().applies[1:])
    assert pod["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    assert [each["key"] for each in pod["spec"]["tolerations"]] == ["gpu", "night"]
    selector = {"pool": "gpu", "zone": "a"} if with_workers else None
    assert pod["spec"].get("nodeSelector") == selector
    assert ("affinity" in pod["spec"]) == with_workers


def test_a_failed_sync_is_retried_with_growing_delays():
    world = World(make_job(numNodes=1, volumes=ZIP), make_queue())
    world.settle()
    world.end_container("train-sync-0", "sync", exit_code=1, finished_at=world.now, message="boom")
    plan = world.settle()
    assert plan.requeue_after == 10
    world.pass_time(seconds=10)
    world.settle()
    assert (PODS.plural, "train-sync-1") in world.created
    world.end_container("train-sync-1", "sync", exit_code=1, finished_at=world.now)
    assert world.settle().requeue_after == 20
    for number in range(2, 6):
        world.pass_time(minutes=5)
        world.settle()
        world.end_container(f"train-sync-{number}", "sync", exit_code=1, finished_at=world.now)
    assert len(world.observed().workspace.sync_pods) == 3, "only the last few stay"


def test_an_evicted_sync_pod_is_replaced():
    world = World(make_job(numNodes=1, volumes=ZIP), make_queue())
    world.settle()
    idle = (ContainerStatus(name="sync"),)
    world.pod("train-sync-0", phase="Failed", reason="Evicted", container_statuses=idle)
    assert world.settle().requeue_after == 10
    assert world.job.status.reason == "Evicted"


def test_a_refused_archive_waits_for_a_new_upload():
    digest = {names.WORKSPACE_SHA256: "a" * 64}
    world = World(make_job(numNodes=1, volumes=ZIP, annotations_=digest), make_queue())
    world.settle()
    message = '{"reason":"UnsafeArchive","message":"member ../x leaves the tree","permanent":true}'
    world.end_container("train-sync-0", "sync", exit_code=1, message=message)
    world.pass_time(hours=9)
    world.settle()
    assert (world.phase, world.job.status.reason) == ("Syncing", "UnsafeArchive")
    assert "../x" in world.job.status.message
    meta = replace(world.job.metadata, annotations={names.WORKSPACE_SHA256: "b" * 64})
    world.job = replace(world.job, metadata=meta)
    world.settle()
    assert world.observed().workspace.sync_pods[-1].metadata.name == "train-sync-1"
    world.sync_done()
    world.settle()
    assert world.phase == "Queued"


def test_an_unusable_source_can_be_changed_in_the_spec():
    git = {"workspace": {"source": "git", "url": "https://example.org/a.git"}}
    world = World(make_job(numNodes=1, volumes=git), make_queue())
    world.settle()
    message = '{"reason":"SourceNotFound","message":"no branch main","permanent":true}'
    world.end_container("train-sync-0", "sync", exit_code=1, message=message)
    world.settle()
    assert (world.phase, world.job.status.reason) == ("Syncing", "SourceNotFound")
    assert "Change spec.volumes.workspace, or" in world.job.status.message


@pytest.mark.parametrize("synced", [False, True])
@pytest.mark.parametrize("source", ["git", "none"])
def test_a_source_that_is_corrected_while_the_job_is_suspended_is_used(synced: bool, source: str):
    """A fetch may have ended just before the suspension; no status says so."""
    workspace = WorkspaceVolume(source="git", url="https://example.org/wrong.git")
    world = World(make_job(numNodes=1), make_queue())
    world.spec(volumes=Volumes(workspace=workspace))
    world.settle()
    if synced:
        world.sync_done()
    world.suspend()
    assert (world.phase, world.job.status.workspace_commit) == ("Suspended", "")
    url = "https://example.org/right.git" if source == "git" else None
    world.spec(volumes=Volumes(workspace=replace(workspace, source=source, url=url)))
    world.settle()
    world.resume()
    if source == "git":
        assert world.phase == "Syncing"
        latest = world.observed().workspace.sync_pods[-1]
        assert is_current(world.job, latest)
        world.sync_done()
        world.settle()
    assert (world.phase, len(world.gangs)) == ("Queued", 1)


def test_a_new_upload_replaces_the_waiting_sync_pod():
    world = World(make_job(numNodes=1, volumes=ZIP), make_queue())
    world.settle()
    world.pod("train-sync-0", phase="Running")
    meta = replace(world.job.metadata, annotations={names.WORKSPACE_SHA256: "b" * 64})
    world.job = replace(world.job, metadata=meta)
    world.settle()
    pod = world.observed().workspace.sync_pods[-1]
    assert pod.metadata.annotations.workspace_sha256 == "b" * 64
    world.sync_done()
    meta = replace(world.job.metadata, annotations={names.WORKSPACE_SHA256: "c" * 64})
    world.job = replace(world.job, metadata=meta)
    world.settle()
    assert world.phase == "Syncing", "the synced content is not the one of the job"


@pytest.mark.parametrize(("digest", "pods"), [("", 1), ("b" * 64, 0)], ids=["any", "one"])
def test_a_new_token_replaces_a_sync_pod_that_accepts_any_upload(digest: str, pods: int):
    """A pod for a single upload accepts it by its digest, so it stays."""
    named = {names.WORKSPACE_SHA256: digest} if digest else {}
    world = World(make_job(numNodes=1, volumes=ZIP, annotations_=named), make_queue())
    world.settle()
    world.pod("train-sync-0", phase="Running")
    for token in ("c", "d"):
        annotations = named | {names.UPLOAD_TOKEN_SHA256: token * 64}
        meta = replace(world.job.metadata, annotations=annotations)
        world.job = replace(world.job, metadata=meta)
        world.settle()
        world.pod(world.observed().workspace.sync_pods[-1].metadata.name, phase="Running")
    latest = world.observed().workspace.sync_pods[-1].metadata
    assert latest.annotations.upload_token_sha256 == ("d" * 64 if pods else "")
    world.sync_done()
    world.settle()
    assert world.phase == "Queued"
    meta = replace(world.job.metadata, annotations=named | {names.UPLOAD_TOKEN_SHA256: "e" * 64})
    world.job = replace(world.job, metadata=meta)
    world.settle()
    assert world.phase == "Queued", "the uploaded content stays"


def test_a_terminating_sync_pod_is_waited_for():
    world = World(make_job(numNodes=1, volumes=ZIP), make_queue())
    world.settle()
    key = (PODS.plural, "train-sync-0")
    pod = world.objects[key]
    world.objects[key] = replace(pod, metadata=replace(pod.metadata, deletion_timestamp=world.now))
    world.settle()
    assert world.job.status.reason == "Replacing"
    del world.objects[key]
    world.settle()
    assert world.created[-1] == key


def live_sync_pods(world: World) -> list[str]:
    return [pod.metadata.name for pod in world.observed().workspace.sync_pods if alive(pod)]


@pytest.mark.parametrize("phase", ["Pending", "Running"])
@pytest.mark.parametrize(("delivery", "kind"), [("shared", "sync"), ("direct", "serve")])
def test_a_lost_claim_is_recreated_and_filled(delivery, kind, phase):
    """By a new pod only: one that has not started yet would mount the new PVC as well."""
    volumes = {"workspace": {"source": "zip", "delivery": delivery}}
    world = World(make_job(numNodes=1, volumes=volumes), make_queue())
    world.settle()
    name = f"train-{kind}-0"
    world.pod(name, phase=phase)
    former = world.objects[PODS.plural, name].metadata.uid
    del world.objects[CLAIMS.plural, "train-workspace"]
    plan = world.step()
    assert ([delete.uid for delete in plan.deletes], plan.applies) == ([former], ())
    assert world.job.status.message == ("PVC train-workspace was deleted. Replacing the sync pod.")
    world.step(writes=1)  # the process dies after the write of the PVC
    world.settle()
    assert world.created[-2:] == [(CLAIMS.plural, "train-workspace"), (PODS.plural, name)]
    assert live_sync_pods(world) == [name]


def take_claim_time_from_another_server(world: World, pod: str, skew: int) -> None:
    key = (CLAIMS.plural, "train-workspace")
    claim, pod_meta = world.objects[key], world.objects[PODS.plural, pod].metadata
    claim_time = pod_meta.creation_timestamp + timedelta(seconds=skew)
    meta = replace(claim.metadata, creation_timestamp=claim_time)
    world.objects[key] = replace(claim, metadata=meta)


@pytest.mark.parametrize("skew", [-2, 0, 2])
@pytest.mark.parametrize(
    ("delivery", "pod", "is_lost", "phase"),
    [
        ("shared", "train-sync-0", False, "Queued"),
        ("direct", "train-serve-0", False, "Queued"),
        ("shared", "train-sync-0", True, "Syncing"),
    ],
)
def test_clocks_do_not_decide_to_which_claim_a_result_belongs(delivery, pod, is_lost, phase, skew):
    """The times of a PVC and a pod can come from two API servers, `skew` seconds apart."""
    volumes = {"workspace": {"source": "zip", "delivery": delivery}}
    world = World(make_job(numNodes=1, volumes=volumes), make_queue())
    world.settle()
    if delivery == "direct":
        world.serves()
    else:
        world.sync_done()
    if is_lost:
        del world.objects[CLAIMS.plural, "train-workspace"]
        world.step()
    take_claim_time_from_another_server(world, pod, skew)
    world.settle()
    assert world.phase == phase


def test_the_content_of_a_lost_claim_is_synced_by_the_next_pod():
    world = World(make_job(numNodes=1, volumes=ZIP), make_queue())
    world.settle()
    world.sync_done()
    del world.objects[CLAIMS.plural, "train-workspace"]
    world.pass_time(seconds=60)
    world.settle()
    assert world.created[-2:] == [
        (CLAIMS.plural, "train-workspace"),
        (PODS.plural, "train-sync-1"),
    ]
    assert live_sync_pods(world) == ["train-sync-1"]


def test_a_lost_claim_and_a_lost_node_delay_no_sync():
    world = World(make_job(numNodes=1, volumes=ZIP), make_queue())
    world.settle()
    world.node("node-1")
    world.place("train-sync-0", "node-1")
    world.pod("train-sync-0", phase="Running")
    del world.objects[CLAIMS.plural, "train-workspace"]
    world.node("node-1", False)
    world.pass_time(seconds=40)
    plan = world.step()
    assert [delete.name for delete in plan.deletes] == ["train-sync-0"]
    assert world.created[-2:] == [
        (CLAIMS.plural, "train-workspace"),
        (PODS.plural, "train-sync-1"),
    ]


def test_a_deleted_sync_pod_is_recreated_and_finds_its_work_done():
    world = World(make_job(numNodes=1, volumes=ZIP), None)
    world.queue = make_queue()
    world.settle()
    world.sync_done()
    world.settle()
    del world.objects[PODS.plural, "train-sync-0"]
    world.delete_child_job()
    world.settle()
    assert world.created[-1] == (PODS.plural, "train-sync-0")
    world.sync_done()
    world.settle()
    assert world.created[-1] == (JOBS.plural, "train-r1")


def test_a_recreated_claim_without_a_status_is_filled_first():
    world = World(make_job(numNodes=1, volumes=ZIP), make_queue())
    world.settle()
    world.sync_done()
    world.settle()
    del world.objects[PODS.plural, "train-sync-0"]
    del world.objects[CLAIMS.plural, "train-workspace"]
    world.delete_child_job()
    world.pass_backoff()
    world.step(1)  # the process dies after the write of the PVC
    world.claim_is("Pending")
    world.settle()
    assert world.created[-1] == (PODS.plural, "train-sync-0")
    assert (JOBS.plural, "train-r1") not in world.created


UNBOUND = "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims."


def test_a_claim_that_does_not_bind_is_named():
    world = World(make_job(numNodes=1, volumes=ZIP), make_queue())
    world.settle()
    world.claim_is("Pending")
    world.settle()
    assert world.job.status.reason == "SyncPodStarting", "it may wait for its first consumer"
    world.not_placed(UNBOUND, pod="train-sync-0")
    plan = world.step()
    assert world.job.status.reason == "ClaimPending"
    assert "kubectl describe pvc train-workspace" in world.job.status.message
    assert all(event.type == "Normal" for event in plan.events), "each new claim gets some time"
    world.claim_is("Bound")
    world.settle()
    assert world.job.status.reason == "SyncPodStarting", "the message of the scheduler is stale"


def test_a_claim_that_cannot_bind_has_a_reason():
    shared = {"workspace": {"source": "zip", "delivery": "shared"}}
    world = World(make_job(numNodes=1, volumes=shared), make_queue())
    world.settle()
    world.claim_is("Pending", storage_class=None)
    assert [event.type for event in world.step().events] == ["Warning"]
    assert world.job.status.reason == "NoStorageClass"
    assert world.job.status.message.endswith(
        "Set storageClassName, then delete the PVC (kubectl delete pvc train-workspace)."
    )
    world.claim_is("Pending")
    world.warn(CLAIMS, "train-workspace", "ProvisioningFailed", 'storageclass "fast" not found')
    world.settle()
    assert world.job.status.reason == "ProvisioningFailed"
    assert 'PVC train-workspace (storage class fast, ReadWriteOnce): storageclass "fast"' in (
        world.job.status.message
    )
    world.claim_is("Bound")
    world.settle()
    assert world.job.status.reason == "SyncPodStarting"


def test_an_image_pull_failure_of_the_sync_pod_is_reported():
    world = World(make_job(numNodes=1, volumes=ZIP), make_queue())
    world.settle()
    world.container_waits("train-sync-0", "ErrImagePull", "no such image")
    world.settle()
    assert world.job.status.reason == "ImagePullFailed"
