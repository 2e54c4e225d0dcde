"""Pods with the labels of a job but without its Job: orphaned workers and users' copies."""

import pytest
from msgspec.structs import replace

from torchrun_api.kinds.meta import OwnerReference
from torchrun_api.kinds.resources import JOBS, PODS
from unit.reconcile.orphaning import SUFFIX, add_copy, job_named, orphan
from world import World, make_job, make_queue


def running(**spec: object) -> World:
    job = make_job(**{"numNodes": 2, "reliability": {"maxRestarts": 5}, **spec})
    world = World(job, make_queue())
    world.suffix = SUFFIX
    world.settle()
    world.all_workers("Running")
    world.settle()
    assert world.phase == "Running"
    return world


def orphaned(**spec: object) -> World:
    """kubectl delete job --cascade=orphan."""
    world = running(**spec)
    orphan(world)
    return world


def test_orphaned_workers_keep_the_admission_of_an_edited_job() -> None:
    """Running pods keep their quota, so no admission can follow."""
    queue = make_queue(quota={"nodes": 2})
    world = World(make_job(numNodes=2, nodeResources={"cpus": 1}), queue)
    world.suffix = SUFFIX
    world.settle()
    world.admit(2)
    world.settle()
    world.all_workers("Running")
    world.settle()
    assert world.phase == "Running"
    wanted = make_job(nodeResources={"cpus": 2}).spec.node_resources
    world.spec(node_resources=wanted)
    orphan(world)
    world.settle()
    status = world.job.status
    assert (world.phase, status.reason) == ("Queued", "OrphanedWorkers")
    assert "requests 2 of cpu on each node, but was admitted with 1." in status.message
    assert "kubectl delete pod -n ml train-0-bcdfg train-1-bcdfg" in status.message
    world.vanish("train-0-bcdfg", "train-1-bcdfg")
    world.settle()
    assert world.job.status.reason == "WaitingForAdmission"


def start_next(world: World) -> None:
    world.all_workers("Running")
    world.settle()


def test_orphaned_workers_block_the_next_gang_and_the_message_says_how_to_delete_them():
    world = orphaned()
    world.settle()
    start_next(world)
    world.pass_time(hours=24)
    plan = world.settle()
    assert not plan.deletes
    status = world.job.status
    assert (world.phase, status.reason) == ("Queued", "OrphanedWorkers")
    assert "Waiting for 2 pods of the previous gang to terminate" in status.message
    assert "kubectl delete pod -n ml train-0-bcdfg train-1-bcdfg" in status.message
    assert {pod.metadata.annotations.start for pod in world.workers()} == {""}
    events = [(e.type, e.reason) for plan in world.plans for e in plan.events]
    assert ("Warning", "OrphanedWorkers") in events
    world.vanish("train-0-bcdfg", "train-1-bcdfg")
    world.settle()
    assert world.phase == "Running"


def test_terminating_orphans_are_waited_for():
    world = orphaned()
    world.settle()
    start_next(world)
    for name in ("train-0-bcdfg", "train-1-bcdfg"):
        pod = world.objects[PODS.plural, name]
        meta = replace(pod.metadata, deletion_timestamp=world.now)
        world.objects[PODS.plural, name] = replace(pod, metadata=meta)
    world.settle()
    assert world.job.status.reason == "WaitingForOldGang"
    assert "kubectl delete" not in world.job.status.message
    world.containers_stop()
    world.settle()
    assert world.phase == "Running"


def test_a_suspension_names_orphans():
    world = orphaned()
    world.spec(suspend=True)
    world.settle()
    suspended = world.condition("Suspended")
    assert suspended.status == "False"
    assert "Waiting for 2 pods to terminate: train-0-bcdfg, train-1-bcdfg." in suspended.message
    assert "kubectl delete pod -n ml train-0-bcdfg train-1-bcdfg" in suspended.message
    world.vanish("train-0-bcdfg", "train-1-bcdfg")
    world.settle()
    assert world.phase == "Suspended"


def test_only_the_first_orphans_are_named():
    world = orphaned(numNodes=6)
    world.settle()
    start_next(world)
    assert world.job.status.message.endswith("train-2-bcdfg train-3-bcdfg and 2 more).")


REPLICA_SET = OwnerReference(kind="ReplicaSet", name="mine", uid="uid-rs", controller=True)


@pytest.mark.parametrize(
    ("name", "owners"),
    [
        ("my-debug-copy", ()),
        ("train-0-bcdfg-debug", ()),
        ("train-0", ()),
        ("train-0-debug", ()),
        ("train-r1-w-0-copy2", ()),
        ("train-0-bcdf", ()),
        ("train-0-bcdfg2", ()),
        ("other-0-bcdfg", ()),
        ("train-0-hjklm", (REPLICA_SET,)),
        ("my-debug-hjklm", (job_named("my-debug"),)),
        ("train-0-hjklm", (job_named("my-debug"),)),
        ("train-debug-0-hjklm", (job_named("train-debug"),)),
        ("retrain-0-hjklm", (job_named("retrain"),)),
    ],
)
def test_a_copied_pod_with_the_labels_blocks_nothing(name: str, owners: tuple[OwnerReference, ...]):
    world = running()
    add_copy(world, name, *owners)
    world.settle()
    world.suspend()
    assert world.phase == "Suspended"
    world.resume()
    start_next(world)
    assert world.phase == "Running"
    assert (PODS.plural, name) in world.objects


@pytest.mark.parametrize("name", ["train-0-hjklm", "train-r7-1-hjklm", "train-r7-w-1-hjklm"])
@pytest.mark.parametrize("there", [True, False])
def test_a_worker_of_an_earlier_job_of_this_name_is_waited_for(name: str, there: bool):
    """The garbage collector deletes pods of a deleted Job, but no orphaned pods."""
    world = running()
    add_copy(world, name, job_named("train-r7"))
    if there:
        job = world.objects[JOBS.plural, "train"]
        meta = replace(job.metadata, name="train-r7", uid="uid-of-train-r7", owner_references=())
        world.objects[JOBS.plural, "train-r7"] = replace(job, metadata=meta)
    world.suspend()
    suspended = world.condition("Suspended")
    assert suspended.status == "False"
    assert (f"kubectl delete pod -n ml {name}" in suspended.message) is there
    world.vanish(name)
    world.settle()
    assert world.phase == "Suspended"


def test_pods_of_a_just_deleted_job_are_left_to_the_garbage_collector():
    world = running()
    del world.objects[JOBS.plural, "train"]
    world.settle()
    start_next(world)
    assert world.job.status.reason == "WaitingForOldGang"


def test_pods_with_an_existing_job_are_no_orphans():
    world = running()
    world.pod("train-0-bcdfg", phase="Failed")
    world.settle()
    start_next(world)
    assert world.job.status.reason == "WaitingForOldGang"
