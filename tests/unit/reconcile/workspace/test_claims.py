"""PVCs that are deleted, lost or terminating while a job needs them."""

from typing import Any

import pytest
from msgspec.structs import replace

from torchrun_api.kinds.core import PersistentVolumeClaim
from torchrun_api.kinds.meta import ChildLabels, ChildMeta
from torchrun_api.kinds.resources import CLAIMS, JOBS, PODS
from torchrun_controller.reconcile.model.plan import Plan
from world import ZIP, World, make_job, make_queue

WORKSPACE, CHECKPOINTS = "train-workspace", "train-checkpoints"
LABELS = ChildLabels(torchrun_job="train")


def running(**spec: Any) -> World:
    """A running gang with a workspace and checkpoints."""
    job = make_job(**{"numNodes": 1, "volumes": ZIP, "reliability": {"maxRestarts": 5}, **spec})
    world = World(job, make_queue(storage={"checkpoints": {"size": "1Gi"}}))
    world.settle()
    if "volumes" not in spec:
        world.claim_is("Bound")
        world.sync_done()
        world.settle()
    world.all_workers("Running")
    world.settle()
    assert world.phase == "Running"
    return world


def no_workspace() -> World:
    return running(volumes={})


def delete(world: World, name: str) -> None:
    """A PVC is deleted, but pods that mount it keep it."""
    claim = world.objects[CLAIMS.plural, name]
    meta = replace(claim.metadata, deletion_timestamp=world.now)
    world.objects[CLAIMS.plural, name] = replace(claim, metadata=meta)


def gone(world: World, name: str) -> None:
    del world.objects[CLAIMS.plural, name]


def applied(plan: Plan) -> list[str]:
    return [f"{apply.kind.kind}/{apply.name}" for apply in plan.applies]


def storage_ready(world: World) -> tuple[str, str] | None:
    found = [c for c in world.job.status.conditions if c.type == "StorageReady"]
    return (found[0].reason, found[0].message) if found else None


@pytest.mark.parametrize("name", [WORKSPACE, CHECKPOINTS])
def test_a_running_gang_reports_a_terminating_claim(name: str):
    world = running()
    delete(world, name)
    plan = world.step()
    assert not plan.applies
    assert world.phase == "Running"
    condition = storage_ready(world)
    assert condition is not None
    assert condition[0] == "ClaimTerminating"
    assert f"PVC {name} is being deleted." in condition[1]
    assert [(e.type, e.reason) for e in plan.events] == [("Warning", "ClaimTerminating")]
    assert not world.step().events


def test_no_gang_is_created_with_terminating_checkpoints():
    world = no_workspace()
    delete(world, CHECKPOINTS)
    world.all_workers("Failed")
    world.settle()
    assert (world.phase, world.job.status.reason) == ("Queued", "ClaimTerminating")
    assert "kubectl describe pvc train-checkpoints" in world.job.status.message
    assert len(world.gangs) == 1
    assert world.job.status.restarts == 1
    gone(world, CHECKPOINTS)
    assert applied(world.step()) == [f"PersistentVolumeClaim/{CHECKPOINTS}", "Job/train-r1"]
    world.settle()
    assert world.job.status.restarts == 1


def test_a_terminating_workspace_is_not_ready():
    world = running()
    delete(world, WORKSPACE)
    world.all_workers("Failed")
    world.settle()
    condition = world.condition("WorkspaceReady")
    assert (world.phase, condition.status, condition.reason) == (
        "Syncing",
        "False",
        "ClaimTerminating",
    )
    assert len(world.gangs) == 1
    gone(world, WORKSPACE)
    assert applied(world.step()) == [f"PersistentVolumeClaim/{WORKSPACE}", "Pod/train-sync-0"]


def test_sync_and_setup_pods_release_a_terminating_claim():
    world = World(make_job(numNodes=1, volumes=ZIP), make_queue())
    world.settle()
    world.claim_is("Bound")
    world.pod("train-sync-0", phase="Running")
    delete(world, WORKSPACE)
    plan = world.step()
    assert [d.name for d in plan.deletes] == ["train-sync-0"]
    assert world.job.status.reason == "ClaimTerminating"
    assert (PODS.plural, "train-sync-0") not in world.objects
    gone(world, WORKSPACE)
    world.settle()
    assert (CLAIMS.plural, WORKSPACE) in world.objects


@pytest.mark.parametrize("suspended", [True, False])
def test_finished_pods_release_a_terminating_claim(suspended: bool):
    """Kubernetes keeps the PVC for them, too."""
    world = running()
    if suspended:
        world.spec(suspend=True)
        world.settle()
        world.containers_stop()
        world.settle()
        assert world.phase == "Suspended"
    delete(world, WORKSPACE)
    if not suspended:
        world.all_workers("Failed")
    world.settle()
    assert (PODS.plural, "train-sync-0") not in world.objects
    gone(world, WORKSPACE)
    if suspended:
        world.resume()
    world.settle()
    assert (CLAIMS.plural, WORKSPACE) in world.objects
    assert world.created[-1] == (PODS.plural, "train-sync-0")


def test_deleted_checkpoints_are_recreated_during_a_gang():
    world = no_workspace()
    gone(world, CHECKPOINTS)
    plan = world.step()
    assert applied(plan) == [f"PersistentVolumeClaim/{CHECKPOINTS}"]
    assert [(e.type, e.reason) for e in plan.events] == [("Warning", "ClaimDeleted")]
    assert "Its data is lost." in plan.events[0].message
    world.settle()
    assert storage_ready(world) is None


@pytest.mark.parametrize("head", [None, {}], ids=["one-job", "two-jobs"])
def test_checkpoints_that_the_queue_gets_later_are_for_the_next_gang(head):
    spec = {} if head is None else {"head": head}
    world = World(make_job(numNodes=2, **spec), make_queue())
    world.settle()
    world.all_workers("Running")
    world.settle_twice()
    world.queue = make_queue(storage={"checkpoints": {"size": "1Gi"}})
    plan = world.settle()
    assert (world.phase, plan.events, storage_ready(world)) == ("Running", (), None)
    assert (CLAIMS.plural, CHECKPOINTS) not in world.objects
    world.suspend()
    world.resume()
    assert (CLAIMS.plural, CHECKPOINTS) in world.objects
    world.all_workers("Running")
    world.settle()
    gone(world, CHECKPOINTS)
    plan = world.step()
    assert [(e.type, e.reason) for e in plan.events] == [("Warning", "ClaimDeleted")]


def test_a_claim_that_no_pod_of_the_gang_mounts_is_not_reported():
    """It is of an earlier job with the same name, or the queue had checkpoints then."""
    world = no_workspace()
    world.queue = make_queue()
    world.suspend()
    world.resume()
    world.all_workers("Running")
    world.settle_twice()
    assert world.phase == "Running"
    delete(world, CHECKPOINTS)
    assert (world.settle().events, storage_ready(world)) == ((), None)


def test_a_gang_starts_with_its_recreated_claim():
    """The old pods release the PVC only after the new gang was created."""
    world = World(make_job(numNodes=1), make_queue(storage={"checkpoints": {"size": "1Gi"}}))
    world.settle()
    gone(world, CHECKPOINTS)
    verdict = f'0/1 nodes are available: persistentvolumeclaim "{CHECKPOINTS}" not found.'
    world.not_placed(verdict, 0)
    world.settle()
    assert (CLAIMS.plural, CHECKPOINTS) in world.objects
    world.all_workers("Running")
    world.settle()
    assert world.phase == "Running"


def test_a_claim_that_lost_its_volume_is_named():
    world = no_workspace()
    claim = world.objects[CLAIMS.plural, CHECKPOINTS]
    lost = replace(claim, status=replace(claim.status, phase="Lost"))
    world.objects[CLAIMS.plural, CHECKPOINTS] = lost
    world.settle()
    condition = storage_ready(world)
    assert condition is not None
    assert condition[0] == "ClaimLost"
    assert "kubectl delete pvc train-checkpoints" in condition[1]


@pytest.mark.parametrize("case", ["no queue", "taken", "existing", "none"])
def test_no_claim_is_recreated_without_need(case: str):
    world = no_workspace()
    gone(world, CHECKPOINTS)
    if case == "no queue":
        world.queue = None
    elif case == "taken":
        foreign = ChildMeta(name=CHECKPOINTS, namespace="ml", uid="foreign", labels=LABELS)
        world.objects[CLAIMS.plural, CHECKPOINTS] = PersistentVolumeClaim(metadata=foreign)
    elif case == "existing":
        world.queue = make_queue(storage={"checkpoints": {"claimName": "shared"}})
    else:
        world.queue = make_queue()
    assert not applied(world.step())


def test_a_deleted_claim_stays_deleted_after_the_end():
    world = no_workspace()
    world.all_workers("Succeeded")
    world.job_condition("Complete")
    world.settle()
    assert world.phase == "Succeeded"
    gone(world, CHECKPOINTS)
    assert not applied(world.step())


def test_a_terminating_claim_does_not_affect_a_suspended_job():
    world = no_workspace()
    world.spec(suspend=True)
    world.settle()
    world.containers_stop()
    delete(world, CHECKPOINTS)
    world.settle()
    assert world.phase == "Suspended"
    world.resume()
    assert world.job.status.reason == "ClaimTerminating"
    gone(world, CHECKPOINTS)
    world.settle()
    assert [key for key in world.created if key[0] == JOBS.plural][-1][1] == "train-r1"
