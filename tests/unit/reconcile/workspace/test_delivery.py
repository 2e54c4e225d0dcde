"""Delivery without shared storage: when it is chosen, and that the choice is final."""

import pytest
from msgspec.structs import replace

from torchrun_api import names
from torchrun_api.kinds.core import (
    ContainerState,
    ContainerStatus,
    StateRunning,
    StateTerminated,
    StateWaiting,
)
from torchrun_api.kinds.meta import Condition
from torchrun_api.kinds.resources import CLAIMS, JOBS, PODS
from world import ZIP, World, make_job, make_queue

DIRECT = {"workspace": {"source": "zip", "delivery": "direct"}}
UNBOUND = "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims."


def submitted(volumes=ZIP, queue=None, **spec) -> World:
    world = World(make_job(numNodes=2, volumes=volumes, **spec), queue or make_queue())
    world.step()
    return world


def unbound(volumes=ZIP, **spec) -> World:
    """A job on a cluster whose storage never binds the PVC."""
    world = submitted(volumes, **spec)
    world.claim_is("Pending")
    world.settle()
    return world


def pods(world: World) -> list[str]:
    return [name for kind, name in world.created if kind == PODS.plural]


def body_of(world: World, kind, name: str) -> dict:
    applies = [a for plan in world.plans for a in plan.applies]
    return next(a.body for a in reversed(applies) if a.kind is kind and a.name == name)


def trainer(world: World, job: str = "train") -> dict:
    spec = body_of(world, JOBS, job)["spec"]["template"]["spec"]
    return next(c for c in spec["containers"] if c["name"] == "trainer")


def variables(world: World, job: str = "train") -> dict[str, str]:
    return {v["name"]: v.get("value", "") for v in trainer(world, job)["env"]}


def sync_variables(world: World, pod: str) -> dict[str, str]:
    [sync, _] = body_of(world, PODS, pod)["spec"]["containers"]
    return {v["name"]: v.get("value", "") for v in sync["env"]}


def test_an_unbound_claim_is_replaced_by_a_serve_pod():
    world = submitted()
    world.claim_is("Pending")
    plan = world.settle()
    assert plan.requeue_after == 30
    world.pass_time(seconds=29)
    assert world.settle().requeue_after == 1
    assert pods(world) == ["train-sync-0"]
    world.pass_time(seconds=1)
    plan = world.step()
    assert [delete.name for delete in plan.deletes] == ["train-sync-0"]
    assert world.job.status.reason == "DirectDelivery"
    assert "PVC train-workspace is not bound after 30 s." in world.job.status.message
    world.settle()
    assert pods(world) == ["train-sync-0", "train-serve-0"]
    spec = body_of(world, PODS, "train-serve-0")["spec"]
    assert spec["volumes"][0] == {"name": "workspace", "emptyDir": {"sizeLimit": "10Gi"}}


@pytest.mark.parametrize(
    ("size", "limit"), [("10Gi", 5 << 30), ("1001", 500), ("1", 1), ("1Ti", 50 << 30)]
)
def test_the_storage_of_a_pod_has_room_for_an_archive_and_its_files(size, limit):
    """Above the limit of the emptyDir, the kubelet evicts the pod with the only copy."""
    zipped = {"workspace": {**DIRECT["workspace"], "size": size}}
    world = submitted(zipped)
    assert "TORCHRUN_SYNC_MAX_BYTES" not in sync_variables(world, "train-serve-0")
    world.claim_is("Pending", storage_class=None)
    world.settle()
    spec = body_of(world, PODS, "train-serve-0")["spec"]
    assert spec["volumes"][0]["emptyDir"] == {"sizeLimit": size}
    assert sync_variables(world, "train-serve-0")["TORCHRUN_SYNC_MAX_BYTES"] == str(limit)


def test_failed_provisioning_is_not_waited_for():
    world = unbound()
    world.warn(CLAIMS, "train-workspace", "ProvisioningFailed", "only ReadWriteOnce is supported")
    world.settle()
    assert pods(world) == ["train-sync-0", "train-serve-0"]


def test_an_abandoned_claim_is_recorded_before_its_pod_is_deleted():
    """Otherwise each next pod would wait for the same PVC until a status is written."""
    world = submitted(DIRECT)
    world.claim_is("Pending", storage_class=None)
    world.step(writes=1)  # without a status, which is throttled
    world.settle()
    assert pods(world) == ["train-serve-0", "train-serve-0"]
    assert world.observed().workspace.sync_pods[0].metadata.annotations.delivery == "ephemeral"


def test_a_pause_does_not_forget_that_the_claim_was_abandoned():
    world = unbound()
    world.pass_time(seconds=30)
    world.step()
    assert world.job.status.reason == "DirectDelivery"
    world.suspend()
    assert world.condition("WorkspaceReady").reason == "DirectDelivery"
    world.resume()
    assert pods(world) == ["train-sync-0", "train-serve-0"]


@pytest.mark.parametrize(
    ("verdict", "seconds", "expected"),
    [(UNBOUND, 30, 2), ("0/1 nodes are available: 1 Insufficient cpu.", 3600, 1)],
    ids=["claim", "other"],
)
def test_a_pod_that_waits_for_another_reason_does_not_abandon_the_claim(verdict, seconds, expected):
    world = unbound()
    world.not_placed(verdict, pod="train-sync-0")
    world.pass_time(seconds=seconds)
    world.settle()
    assert len(pods(world)) == expected


def test_workers_fetch_the_manifest_from_the_serve_pod():
    world = unbound()
    world.pass_time(seconds=30)
    world.settle()
    world.takes_upload()
    world.settle()
    assert world.job.status.reason == "WaitingForUpload"
    assert (JOBS.plural, "train") not in world.created
    world.serves()
    world.settle()
    environment = variables(world)
    assert environment["TORCHRUN_WORKSPACE_URL"] == "http://10.0.0.7:8081"
    assert environment["TORCHRUN_WORKSPACE_MANIFEST"] == "ef" * 32
    assert environment["TORCHRUN_WORKSPACE_TARGET"] == "/app"
    assert "TORCHRUN_STATE_DIR" not in environment
    ready = world.condition("WorkspaceReady")
    assert (ready.status, ready.reason) == ("True", "DirectDelivery")
    assert "from pod train-serve-<n>." in ready.message
    world.all_workers("Running")
    world.settle()
    assert world.condition("WorkspaceReady").reason == "DirectDelivery"
    assert not any(c.type == "StorageShared" for c in world.job.status.conditions)


def test_an_ipv6_address():
    world = submitted(DIRECT)
    world.serves(ip="fd00::7")
    world.settle()
    assert variables(world)["TORCHRUN_WORKSPACE_URL"] == "http://[fd00::7]:8081"


def test_requested_direct_delivery_uses_a_claim():
    world = submitted(DIRECT)
    claim = body_of(world, CLAIMS, "train-workspace")
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
    assert pods(world) == ["train-serve-0"]
    spec = body_of(world, PODS, "train-serve-0")["spec"]
    assert spec["volumes"][0]["persistentVolumeClaim"] == {"claimName": "train-workspace"}
    world.claim_is("Pending")
    world.pass_time(seconds=30)
    world.settle()
    assert pods(world) == ["train-serve-0", "train-serve-0"], "on its own storage"
    world.serves()
    world.settle()
    assert "Delivery is direct." in world.condition("WorkspaceReady").message


def test_the_queue_can_request_direct_delivery():
    queue = make_queue(storage={"workspace": {"delivery": "direct"}})
    assert pods(submitted(queue=queue)) == ["train-serve-0"]
    shared = {"workspace": {"source": "zip", "delivery": "shared"}}
    world = unbound(shared)
    world.pass_time(hours=1)
    world.settle()
    assert pods(world) == ["train-sync-0"]


def test_a_claim_that_binds_late_changes_nothing():
    world = unbound()
    world.pass_time(seconds=30)
    world.settle()
    world.claim_is("Bound")
    world.settle()
    assert pods(world) == ["train-sync-0", "train-serve-0"]
    del world.objects[CLAIMS.plural, "train-workspace"]
    world.serves()
    world.settle()
    assert world.condition("WorkspaceReady").status == "True"
    assert world.created.count((CLAIMS.plural, "train-workspace")) == 1


def sync_container(world: World, **states) -> None:
    world.pod(
        "train-serve-0",
        phase="Running",
        container_statuses=(ContainerStatus(name="sync", **states),),
    )


def ended(message: str, exit_code: int = 1) -> ContainerState:
    return ContainerState(terminated=StateTerminated(exit_code=exit_code, message=message))


def test_a_serve_pod_without_a_workspace_has_a_reason():
    world = submitted(DIRECT)
    refused = '{"reason": "InvalidArchive", "message": "no zip", "permanent": true}'
    waits = ContainerState(waiting=StateWaiting(reason="CrashLoopBackOff"))
    for states in ({"state": ended(refused)}, {"state": waits, "last_state": ended(refused)}):
        sync_container(world, **states)
        world.settle()
        assert (world.phase, world.job.status.reason) == ("Syncing", "InvalidArchive")
        assert "no zip. Fix it" in world.job.status.message
    sync_container(world, state=ended('{"reason": "WorkspaceFull", "message": "full"}'))
    world.settle()
    assert world.job.status.message == "full. Retrying."
    again = ContainerState(running=StateRunning())
    sync_container(world, ready=True, state=again, last_state=ended(refused))
    world.settle()
    assert world.job.status.reason == "WaitingForUpload"
    sync_container(world, state=ended('{"sha256": "aa"}', exit_code=0))
    world.settle()
    assert "Waiting for pod train-serve-0 to serve the workspace." in world.job.status.message
    assert pods(world) == ["train-serve-0"]


def running() -> World:
    world = unbound()
    world.pass_time(seconds=30)
    world.settle()
    world.serves()
    world.settle()
    world.all_workers("Running")
    world.settle()
    return world


def fails(world: World) -> None:
    world.end_container("train-0-abcde", "trainer", exit_code=1)
    world.settle()
    world.pass_time(minutes=10)
    world.settle()


def test_a_restart_fetches_from_the_existing_serve_pod():
    world = running()
    fails(world)
    assert variables(world, "train-r1")["TORCHRUN_WORKSPACE_URL"] == "http://10.0.0.7:8081"
    assert pods(world)[-1] == "train-serve-0"


def test_a_lost_serve_pod_needs_a_new_upload():
    world = running()
    world.pod("train-serve-0", phase="Failed", reason="Evicted")
    world.settle()
    assert world.phase == "Running"
    fails(world)
    assert pods(world)[-1] == "train-serve-1"
    world.pod("train-serve-1", phase="Running")
    world.settle()
    assert world.job.status.reason == "WorkspaceLost"
    assert "kubectl torchrun sync train" in world.job.status.message
    assert (JOBS.plural, "train-r1") not in world.created


def test_a_deleted_serve_pod_is_replaced():
    world = running()
    del world.objects[PODS.plural, "train-serve-0"]
    fails(world)
    assert world.phase == "Syncing"
    assert (JOBS.plural, "train-r1") not in world.created, "the claim has no content"


def test_a_suspension_keeps_the_serve_pod_and_the_end_deletes_it():
    world = running()
    world.suspend()
    assert world.phase == "Suspended"
    assert [p.metadata.name for p in world.observed().workspace.sync_pods] == ["train-serve-0"]
    world.resume()
    world.all_workers("Succeeded")
    world.job_condition("Complete")
    world.settle()
    assert world.phase == "Succeeded"
    assert world.observed().workspace.sync_pods == ()


def test_shared_delivery_can_be_requested_later():
    world = unbound()
    world.pass_time(seconds=30)
    world.settle()
    workspace = replace(world.job.spec.volumes.workspace, delivery="shared")
    world.spec(volumes=replace(world.job.spec.volumes, workspace=workspace))
    world.step()
    assert world.job.status.reason == "Replacing"
    world.settle()
    assert pods(world)[-1] == "train-sync-0"


def test_every_worker_runs_the_setup():
    world = unbound(setupCommand="make")
    world.pass_time(seconds=30)
    world.settle()
    world.serves()
    world.settle()
    assert "TORCHRUN_SETUP" in variables(world)
    assert (PODS.plural, "train-setup-0") not in world.created


def test_an_unbound_claim_does_not_affect_workers():
    world = running()
    fails(world)
    world.warn(CLAIMS, "train-workspace", "ProvisioningFailed", "no")
    world.settle()
    assert world.job.status.reason != "ProvisioningFailed"


def test_the_upload_container_has_no_service_account_token():
    world = submitted(DIRECT)
    sync, serve = body_of(world, PODS, "train-serve-0")["spec"]["containers"]
    assert {m["name"] for m in sync["volumeMounts"]} == {"workspace", "tmp"}
    assert {m["name"] for m in serve["volumeMounts"]} == {"workspace", "api"}
    assert all(m.get("readOnly") for m in serve["volumeMounts"])
    assert serve["name"] == names.SERVE_CONTAINER


def test_a_pod_that_was_never_seen_to_run_counts_as_no_wait():
    world = unbound()
    condition = Condition(type="PodScheduled", status="False", message=UNBOUND)
    world.pod("train-sync-0", phase="Failed", conditions=(condition,))
    world.pass_time(seconds=31)
    world.settle()
    assert pods(world) == ["train-sync-0", "train-sync-1"]
