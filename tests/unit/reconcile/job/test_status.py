"""Conditions that follow one another while a job waits."""

import json

import pytest
from msgspec.structs import replace

from torchrun_api.kinds.admission import Dependency
from torchrun_api.kinds.core import Pod
from torchrun_api.kinds.meta import Condition
from torchrun_controller.reconcile.model.observed import (
    FailedRound,
    Rejection,
    RestartsInPlace,
)
from unit.reconcile.failing import fail, running
from unit.reconcile.gang.test_elastic import shrunk
from world import ZIP, World, make_job, make_queue


def running_condition(world: World) -> list[tuple[str, str]]:
    conditions = world.job.status.conditions
    return [(c.status, c.reason) for c in conditions if c.type == "Running"]


def test_a_refusal_that_is_over_leaves_no_condition() -> None:
    world = World(make_job(numNodes=1, volumes=ZIP), make_queue())
    world.rejections = (Rejection("persistentvolumeclaims", "train-workspace", "denied"),)
    world.settle()
    assert running_condition(world) == [("False", "Rejected")]
    world.rejections = ()
    world.settle()
    assert world.phase == "Syncing"
    assert running_condition(world) == []


@pytest.mark.parametrize("ends", [False, True])
def test_conditions_of_others_are_left_to_them(ends: bool) -> None:
    """Also those of an earlier version, which its next status removes."""
    world = running(1)
    if ends:
        world.all_workers("Succeeded")
        world.job_condition("Complete")
    foreign = [
        Condition(type=kind, status="False", reason="X", last_transition_time=world.now)
        for kind in ("acme.example/Budget", "GangHealthy")
    ]
    status = world.job.status
    world.job = replace(
        world.job, status=replace(status, conditions=(*status.conditions, *foreign))
    )
    world.spec(suspend=True)
    plan = world.plan()
    assert plan.status is not None
    assert {c.type for c in plan.status.conditions} >= {"QueueReady", "Running"}
    assert not {c.type for c in foreign} & {c.type for c in plan.status.conditions}


def test_a_gang_that_ends_stays_running_until_its_pods_are_gone() -> None:
    world = running(1)
    world.spec(suspend=True)
    world.settle()
    assert world.phase == "Running"
    assert running_condition(world) == [("True", "WorkersRunning")]


def test_the_success_of_a_head_that_the_cache_shows_late_is_counted() -> None:
    world = World(make_job(numNodes=2, head={}), make_queue())
    world.settle()
    world.all_workers("Running")
    world.settle()
    head = world.workers()[0].metadata.name
    pods = {key: pod for key, pod in world.objects.items() if isinstance(pod, Pod)}
    world.job_condition("Complete")
    for key in pods:  # the cache of the Jobs is newer than that of the pods
        del world.objects[key]
    world.settle()
    assert (world.phase, world.job.status.workers_status) == ("Succeeded", "0/2 ready")
    world.objects.update(pods)
    world.pod(head, phase="Succeeded")
    for pod in world.workers()[1:]:
        del world.objects["pods", pod.metadata.name]
    world.settle()
    workers = world.job.status.workers
    assert workers is not None
    assert (workers.succeeded, workers.running) == (1, 0)


def conditions_of(world: World) -> dict[str, str]:
    return {condition.type: condition.status for condition in world.job.status.conditions}


def test_a_suspended_job_shows_nothing_that_it_waited_for() -> None:
    world = World(make_job(numNodes=1, volumes=ZIP), make_queue())
    world.settle()
    assert world.job.status.reason == "SyncPodStarting"
    world.suspend()
    assert "WorkspaceReady" not in conditions_of(world)
    world.resume()
    world.sync_done()
    world.spec(depends_on=(Dependency(name="prep"),))
    world.settle()
    assert world.job.status.reason == "DependencyNotFound"
    world.suspend()
    assert "DependenciesMet" not in conditions_of(world)
    assert conditions_of(world)["WorkspaceReady"] == "True"


def test_a_suspended_job_shows_a_queue_that_was_created_late() -> None:
    world = World(make_job(numNodes=1), None)
    world.settle()
    world.suspend()
    assert conditions_of(world)["QueueReady"] == "False"
    world.queue = make_queue()
    world.settle()
    assert conditions_of(world)["QueueReady"] == "True"


def test_a_gang_that_trains_alone_has_a_condition_and_an_event() -> None:
    world = running()
    child = world.observed().gang.current_job.metadata.uid
    world.reports.put_restarts(("ml", "train"), child, RestartsInPlace(alone=True))
    plan = world.step()
    condition = world.condition("Distributed")
    assert (condition.status, condition.reason) == ("False", "NotDistributed")
    (event,) = plan.events
    assert (event.reason, event.message) == ("NotDistributed", condition.message)
    assert "Write the command as python train.py" in condition.message
    assert world.step().events == ()
    world.reports.put_restarts(("ml", "train"), child, RestartsInPlace())
    world.step()
    assert "Distributed" not in conditions_of(world)
    world.reports.put_restarts(("ml", "train"), child, RestartsInPlace(alone=True))
    message = {"exitCode": 125, "reason": "NotDistributed", "message": "Each trained alone."}
    fail(world, message=json.dumps(message))
    world.settle()
    assert (world.phase, world.job.status.reason) == ("Failed", "NotDistributed")
    assert "Distributed" not in conditions_of(world)


@pytest.mark.parametrize("is_shrunk", [False, True])
def test_a_failed_command_that_waits_for_an_edit_is_the_reason(is_shrunk: bool) -> None:
    world = shrunk() if is_shrunk else running()
    world.all_workers("Running")
    world.settle()
    before = world.job.status
    child = world.observed().gang.current_job.metadata.uid
    failed = FailedRound(node=1, exit_code=1, reason="Exception", message="KeyError: 'x'")
    world.reports.put_restarts(("ml", "train"), child, RestartsInPlace(awaits_edit=failed))
    plan = world.step()
    status = world.job.status
    text = (
        "The command failed, and the pods wait for the next edit. Pod"
        f" {world.workers()[1].metadata.name}: KeyError: 'x'."
    )
    assert (status.phase, status.reason) == ("Running", "AwaitingEdit")
    assert status.message == (f"{text} {before.message}" if is_shrunk else text)
    assert running_condition(world) == [("True", "AwaitingEdit")]
    assert [(e.type, e.reason) for e in plan.events] == [("Warning", "AwaitingEdit")]
    world.reports.put_restarts(("ml", "train"), child, RestartsInPlace())
    world.step()
    assert (world.job.status.reason, world.job.status.message) == (before.reason, before.message)
