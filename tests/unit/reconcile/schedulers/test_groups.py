"""The group of a gang: it is deleted with the attempt, and its conditions are in the status."""

from datetime import timedelta
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from torchrun_api.kinds.core import SchedulingGroup
from torchrun_api.kinds.meta import Condition, OwnerReference
from torchrun_controller.reconcile.model.observed import Installed
from torchrun_controller.reconcile.schedulers.kueue import KUEUE_WORKLOADS
from torchrun_controller.reconcile.schedulers.native import NATIVE_GROUPS
from torchrun_controller.reconcile.schedulers.volcano import VOLCANO_POD_GROUPS
from world import World, make_job, make_queue

KINDS = (VOLCANO_POD_GROUPS, KUEUE_WORKLOADS[0], NATIVE_GROUPS[0])
INSTALLED = Installed(resources=frozenset((kind.api_version, kind.plural) for kind in KINDS))
GROUP = VOLCANO_POD_GROUPS.plural
ELASTIC: Any = {"numNodes": 4, "elastic": {"minNodes": 2, "maxNodes": 4}}


def world_of(gang: str = "volcano", **spec: Any) -> World:
    queue = make_queue(scheduling={"gang": gang})
    world = World(make_job(**{"numNodes": 2, "reliability": {"maxRestarts": 1}, **spec}), queue)
    world.installed = INSTALLED
    world.settle()
    return world


def groups(world: World) -> list[str]:
    return [name for plural, name in world.objects if plural == GROUP]


def says(world: World, name: str, kind: str, status: str, message: str, field: str = "") -> None:
    """The scheduler sets a condition of the group."""
    condition = {"type": kind, "status": status, "reason": "Any", "message": message}
    group = world.objects[name, "train"]
    status = msgspec.convert({field or "conditions": [condition]}, type(group.status))
    world.objects[name, "train"] = replace(group, status=status)


def test_a_group_is_created_before_its_child_job_and_stays_with_the_gang():
    world = world_of()
    assert world.created.index((GROUP, "train")) < world.created.index(("jobs", "train"))
    world.all_workers("Running")
    world.settle()
    assert world.phase == "Running"
    assert groups(world) == ["train"]


def test_each_attempt_has_a_group_until_its_pods_have_ended():
    world = world_of()
    world.all_workers("Running")
    world.settle()
    world.end_container("train-0-abcde", "trainer", exit_code=1)
    world.settle()
    world.pass_time(seconds=60)
    world.settle()
    assert groups(world) == ["train", "train-r1"]  # a worker of the old gang has not ended yet
    world.containers_stop()
    world.job_condition("Failed")
    world.settle()
    assert groups(world) == ["train-r1"]


def test_a_finished_job_has_no_group():
    world = world_of()
    world.all_workers("Succeeded")
    world.job_condition("Complete")
    world.settle()
    assert world.phase == "Succeeded"
    assert not groups(world)


def test_a_job_whose_failure_is_certain_has_no_group():
    world = world_of(reliability={"maxRestarts": 0})
    world.all_workers("Running")
    world.settle()
    world.end_container("train-0-abcde", "trainer", exit_code=1)
    world.job_condition("FailureTarget")
    world.settle()
    assert (world.phase, groups(world)) == ("Failed", ["train"]), "a worker has not ended yet"
    world.containers_stop()
    world.settle()
    assert not groups(world)


def test_a_suspension_deletes_the_group_after_the_workers():
    world = world_of()
    world.all_workers("Running")
    world.settle()
    world.spec(suspend=True)
    world.settle()
    assert groups(world) == ["train"]
    world.containers_stop()
    world.settle()
    assert not groups(world)


def test_a_group_is_deleted_without_its_child_job():
    world = world_of()
    world.objects = {k: o for k, o in world.objects.items() if k[0] not in ("jobs", "pods")}
    world.queue = None
    world.settle()
    assert not groups(world)


def test_a_terminating_group_is_not_deleted_again():
    world = world_of()
    group: SchedulingGroup = world.objects[GROUP, "train"]
    meta = replace(group.metadata, deletion_timestamp=world.now)
    world.objects[GROUP, "train"] = replace(group, metadata=meta)
    world.all_workers("Succeeded")
    world.job_condition("Complete")
    world.settle()
    assert groups(world) == ["train"]


def test_groups_of_others_are_left_alone():
    world = world_of()
    group: SchedulingGroup = world.objects[GROUP, "train"]
    others = (OwnerReference(uid="another", controller=True),)
    meta = replace(group.metadata, name="foreign", owner_references=others)
    world.objects[GROUP, "foreign"] = replace(group, metadata=meta)
    world.all_workers("Succeeded")
    world.job_condition("Complete")
    world.settle()
    assert groups(world) == ["foreign"]


# Conditions of the scheduler


@pytest.mark.parametrize(
    ("kind", "status", "field"),
    [
        ("Unschedulable", "True", "conditions"),
        ("UnschedulableOnNodePool", "True", "schedulingConditions"),
        ("PodGroupInitiallyScheduled", "False", "conditions"),
    ],
)
def test_conditions_of_the_group_are_the_reason_of_a_wait(kind, status, field):
    world = world_of()
    says(world, GROUP, kind, status, "2/2 tasks do not fit", field)
    world.settle()
    assert world.job.status.reason == "GangUnschedulable"
    assert world.job.status.message == "PodGroup train: 2/2 tasks do not fit."
    assert world.condition("Scheduled").reason == "GangUnschedulable"
    assert world.condition("Scheduled").message == world.job.status.message
    running = "Not all pods are scheduled. See the condition Scheduled."
    assert world.condition("Running").message == running
    world.all_workers("Running")
    world.settle()
    assert world.job.status.reason == "WorkersRunning"


def test_a_positive_condition_of_the_group_is_no_reason():
    world = world_of()
    says(world, GROUP, "Unschedulable", "False", "fits")
    world.settle()
    assert world.job.status.reason == "WorkersStarting"


# Kueue


def suspended(world: World, suspend: bool, name: str = "train") -> None:
    """Kueue suspends or resumes the child Job."""
    child = world.objects["jobs", name]
    world.objects["jobs", name] = replace(child, spec=replace(child.spec, suspend=suspend))


def kueue_says(world: World, message: str) -> None:
    child = world.objects["jobs", "train"].metadata
    owners = [{"kind": "Job", "name": "train", "uid": child.uid, "controller": True}]
    meta = {"name": "job-train-1a2b3", "namespace": "ml", "ownerReferences": owners}
    condition = {"type": "QuotaReserved", "status": "False", "message": message}
    body = {"metadata": meta, "status": {"conditions": [condition]}}
    world.kinds["workloads"] = KUEUE_WORKLOADS[0]
    world.objects["workloads", "train"] = msgspec.convert(body, SchedulingGroup)


def test_a_job_waits_in_the_queue_until_kueue_admits_it():
    world = world_of("kueue")
    assert (world.phase, world.job.status.reason) == ("Queued", "WaitingForKueue")
    kueue_says(world, "insufficient quota for nvidia.com/gpu")
    world.settle()
    assert world.phase == "Queued"
    assert world.job.status.message == (
        "Workload job-train-1a2b3: insufficient quota for nvidia.com/gpu."
    )
    assert not [e for plan in world.plans for e in plan.events if e.type == "Warning"]
    suspended(world, False)
    world.all_workers("Running")
    world.settle()
    assert world.phase == "Running"
    assert ("workloads", "train") in world.objects


def test_a_preemption_by_kueue_is_no_failure():
    world = world_of("kueue")
    suspended(world, False)
    world.all_workers("Running")
    world.settle()
    suspended(world, True)
    world.end_container("train-0-abcde", "trainer", exit_code=143)
    kueue_says(world, "preempted by another")
    world.settle()
    assert (world.phase, world.job.status.reason) == ("Preempted", "JobSuspended")
    assert "by Kueue" in world.job.status.message
    assert "preempted by another" in world.job.status.message
    assert (world.job.status.restarts, world.job.status.attempt) == (0, 0)
    suspended(world, False)
    world.all_workers("Running")
    world.settle()
    assert world.phase == "Running"


@pytest.mark.parametrize("before", [True, False])
def test_workers_that_ended_by_a_suspension_are_no_failure_later(before):
    """The Job controller has removed its finalizer from those; times tell nothing."""
    world = world_of("kueue")
    suspended(world, False)
    world.all_workers("Running")
    world.settle()
    child = world.objects["jobs", "train"]
    resumed = Condition(type="Suspended", status="False", last_transition_time=world.now)
    world.objects["jobs", "train"] = replace(
        child, status=replace(child.status, conditions=(resumed,))
    )
    deletes = world._released if before else world._ending
    deletes(("pods", "train-0-abcde"), 30)
    world.end_container("train-0-abcde", "trainer", exit_code=143)
    world.settle()
    assert world.job.status.attempt == (0 if before else 1)
    assert world.job.status.restarts == 0


@pytest.mark.parametrize("seconds", [-3600, -1, 0, 1, 3600])
def test_pods_of_a_suspension_are_told_apart_with_any_clock(seconds):
    """The times of pods and those of conditions are from different programs."""
    world = world_of("kueue")
    suspended(world, False)
    world.all_workers("Running")
    world.settle()
    since = world.now + timedelta(seconds=seconds)
    resumed = Condition(type="Suspended", status="False", last_transition_time=since)
    child = world.objects["jobs", "train"]
    world.objects["jobs", "train"] = replace(
        child, status=replace(child.status, conditions=(resumed,))
    )
    world._released(("pods", "train-0-abcde"))
    world.settle()
    assert (world.job.status.attempt, world.job.status.attempts) == (0, ())
    world._ending(("pods", "train-1-abcde"), 30)
    world.settle()
    assert [end.reason for end in world.job.status.attempts] == ["PodDeleted"]


def test_workers_of_a_suspension_that_is_not_visible_yet_are_no_failure():
    world = world_of("kueue")
    suspended(world, False)
    world.all_workers("Running")
    world.settle()
    for pod in world.workers():
        world._released(("pods", pod.metadata.name))
    world.settle()
    world.pass_time(seconds=20)
    world.settle()
    assert (world.phase, world.job.status.attempt) == ("Running", 0)
    suspended(world, True)
    world.settle()
    assert (world.phase, world.job.status.attempt) == ("Preempted", 0)


def test_deleted_workers_are_a_disruption():
    world = world_of("kueue")
    suspended(world, False)
    world.all_workers("Running")
    world.settle()
    for pod in world.workers():
        world._ending(("pods", pod.metadata.name), 30)
    world.settle()
    assert (world.job.status.attempt, world.job.status.disruptions) == (1, 1)
    assert ("jobs", "train") in world.objects

    # Kueue suspends the old Job only now. The controller must not resume it.
    suspended(world, True)
    world.settle()
    world.containers_stop()
    assert ("jobs", "train") not in world.objects
    assert ("jobs", "train-r1") in world.objects


@pytest.mark.parametrize("phase", ["TimedOut", "Failed"])
def test_a_finished_job_leaves_no_job_that_kueue_may_resume(phase):
    world = world_of("kueue", reliability={"maxRestarts": 0, "activeDeadlineSeconds": 60})
    suspended(world, False)
    world.all_workers("Running")
    world.settle()
    if phase == "TimedOut":
        world.pass_time(seconds=60)
    else:
        world.end_container("train-0-abcde", "trainer", exit_code=1)
    world.step()
    assert (world.phase, ("jobs", "train") in world.objects) == (phase, True)
    suspended(world, True)  # before the Job controller has seen how its pods end
    world.settle()
    world.containers_stop()
    assert {plural for plural, _ in world.objects} == {"services"}


def test_a_success_leaves_no_successor_that_kueue_may_resume():
    world = world_of("kueue", **ELASTIC)
    suspended(world, False)
    world.all_workers("Running")
    world.settle()
    world.spec(num_nodes=3)
    world.settle()
    world.containers_stop()
    world.settle()
    assert ("jobs", "train-r1") in world.objects
    child = world.gangs[0]
    complete = Condition(type="Complete", status="True")
    world.objects["jobs", "train"] = replace(
        child, status=replace(child.status, conditions=(complete,))
    )
    world.settle()
    assert world.phase == "Succeeded"
    assert [key for key in world.objects if key[0] == "jobs"] == [("jobs", "train")]


def test_a_head_that_has_succeeded_leaves_no_workers_that_a_user_may_resume():
    world = world_of("none", head={})
    world.all_workers("Running")
    world.settle()
    assert world.phase == "Running"
    suspended(world, True, "train-w")
    world.job_condition("Complete")
    world.settle()
    assert world.phase == "Succeeded"
    assert [key for key in world.objects if key[0] == "jobs"] == [("jobs", "train")]


def test_a_suspended_child_job_is_preempted():
    world = world_of("none")
    suspended(world, True)
    world.settle()
    assert world.phase == "Preempted"
    assert world.job.status.message == (
        "Job train is suspended. The pods start again when it is resumed."
    )
