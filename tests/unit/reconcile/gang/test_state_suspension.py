"""A child Job that Kueue suspends and resumes, while one of its workers is on a lost machine.

The new pods are of the same attempt, so they cannot fence the worker: the next attempt does.
"""

from typing import Any

import pytest
from msgspec.structs import replace

from torchrun_api.kinds.core import Job
from torchrun_api.kinds.meta import Condition
from torchrun_api.kinds.resources import JOBS, PODS
from torchrun_controller.reconcile.model.observed import Installed
from torchrun_controller.reconcile.schedulers.kueue import KUEUE_WORKLOADS
from unit.reconcile.losing import OUT_OF_SERVICE, begin, lose, running
from world import DEFAULTS, World, make_job, make_queue

REPORTING = replace(DEFAULTS, progress_url="http://torchrun-controller:8080")
KUEUE = Installed(resources=frozenset((kind.api_version, kind.plural) for kind in KUEUE_WORKLOADS))


def set_suspended(world: World, suspended: bool, name: str = "train") -> None:
    """Kueue suspends or resumes the child Job, and the Job controller says so in its status."""
    child: Job = world.objects[JOBS.plural, name]
    condition = Condition(
        type="Suspended",
        status="True" if suspended else "False",
        last_transition_time=world.now,
    )
    world.objects[JOBS.plural, name] = replace(
        child,
        spec=replace(child.spec, suspend=suspended),
        status=replace(child.status, conditions=(condition,)),
    )


def suspend(world: World) -> None:
    """Kueue suspends the Job, and the Job controller deletes its pods."""
    set_suspended(world, True)
    for pod in world.workers():
        world._released((PODS.plural, pod.metadata.name))
    world.settle()


def admitted(*, reports: bool = True, **reliability: Any) -> World:
    """A gang that Kueue has admitted runs on node-0 and node-1."""
    job = make_job(numNodes=2, reliability=reliability)
    world = World(job, make_queue(scheduling={"gang": "kueue"}))
    world.defaults = REPORTING if reports else DEFAULTS
    world.installed = KUEUE
    for index in range(4):
        world.node(f"node-{index}")
    world.settle()
    world.resume_child("train")
    set_suspended(world, False)
    begin(world)
    world.settle_twice()
    assert world.phase == "Running"
    return world


def resume(world: World, *indexes: int) -> None:
    """Kueue resumes the Job. The Job controller creates pods for these indexes."""
    set_suspended(world, False)
    spawn(world, *indexes)
    world.settle_twice()


def spawn(world: World, *indexes: int) -> None:
    for index in indexes:
        world._spawn_pod(world.objects[JOBS.plural, "train"], index, "fghij")
        world.place(f"train-{index}-fghij", f"node-{index + 2}")
        world.pod(f"train-{index}-fghij", phase="Running")


def start(world: World, name: str) -> str:
    return world.objects[PODS.plural, name].metadata.annotations.start


def assert_ended_as_lost(world: World) -> None:
    """The attempt has ended by the loss of node-1, which does not count as a restart."""
    (end,) = world.job.status.attempts
    assert (end.number, end.reason, end.node, end.counted) == (0, "NodeLost", "node-1", False)
    assert (world.job.status.restarts, world.job.status.disruptions) == (0, 1)
    assert world.job.status.last_failure.node == "node-1"
    assert (JOBS.plural, "train-r1") in world.objects
    assert [(w.attempt, w.node) for w in world.job.status.unfenced] == [(0, "node-1")]


@pytest.mark.parametrize("reports", [True, False])
def test_a_node_that_is_lost_while_the_job_is_suspended_ends_the_attempt(reports):
    world = admitted(reports=reports)
    world.node("node-1", False)
    world.pass_time(seconds=20)
    suspend(world)
    world.containers_stop()
    plan = world.settle()
    assert (world.phase, world.job.status.attempt) == ("Preempted", 0)
    assert plan.requeue_after == 20
    world.pass_time(seconds=20)
    world.settle()
    assert_ended_as_lost(world)
    # Kueue would resume it.
    assert (JOBS.plural, "train") not in world.objects


def test_a_node_of_a_suspended_job_is_lost_soon_although_the_clock_is_set_back():
    world = admitted()
    world.node("node-1", False)
    suspend(world)
    world.containers_stop()
    assert world.settle().requeue_after == 40
    world.pass_time(hours=-1)
    world.settle()
    assert_ended_as_lost(world)


def test_a_node_that_returns_in_time_keeps_a_suspended_attempt():
    world = admitted()
    suspend(world)
    world.node("node-1", False)
    world.settle()
    world.pass_time(seconds=39)
    world.settle()
    world.node("node-1")
    world.settle()
    world.pass_time(seconds=60)
    world.containers_stop()
    world.settle()
    assert (world.phase, world.job.status.attempt) == ("Preempted", 0)
    resume(world, 0, 1)
    assert (world.phase, world.job.status.attempt) == ("Running", 0)
    assert start(world, "train-0-fghij") == "0"


def test_no_gate_opens_after_a_resumption_beside_a_worker_on_a_silent_node():
    world = admitted()
    world.node("node-1", False)
    world.pass_time(seconds=20)
    suspend(world)
    world.containers_stop()
    resume(world, 0)
    assert start(world, "train-0-fghij") == ""
    assert_ended_as_lost(world)
    assert "before the suspension of Job train" in world.job.status.attempts[0].message


def test_the_next_attempt_waits_for_the_worker():
    world = admitted()
    suspend(world)
    lose(world)
    world.containers_stop()
    world.vanish("train-1-abcde")
    del world.nodes["node-1"]
    world.resume_child("train-r1")
    begin(world)
    assert world.job.status.reason == "WaitingForFence"
    world.node("node-1", True, OUT_OF_SERVICE)
    world.settle()
    assert world.job.status.unfenced == ()


def test_the_gate_waits_for_pods_from_before_the_suspension():
    world = admitted()
    world.pass_time(seconds=20)
    suspend(world)
    world.remove("train-0-abcde")
    resume(world, 0)
    assert start(world, "train-0-fghij") == ""
    assert world.job.status.reason == "WaitingForOldGang"
    world.containers_stop()
    spawn(world, 1)
    world.settle_twice()
    assert start(world, "train-0-fghij") == "0"
    assert world.phase == "Running"


def test_a_follower_from_before_the_suspension_may_train_although_its_leader_is_gone():
    world = admitted()
    world.pass_time(seconds=20)
    suspend(world)
    world.remove("train-0-abcde")
    resume(world, 0)
    world.node("node-1", False)
    world.settle()
    assert start(world, "train-0-fghij") == ""
    assert_ended_as_lost(world)


def test_a_worker_that_vanished_unseen_during_the_suspension_ends_the_attempt():
    world = admitted()
    world.pass_time(seconds=20)
    # No controller runs from here on.
    set_suspended(world, True)
    world.remove("train-0-abcde")
    world.vanish("train-1-abcde")
    del world.nodes["node-1"]
    resume(world, 0, 1)
    assert start(world, "train-0-fghij") == ""
    assert_ended_as_lost(world)


def test_a_pod_that_was_removed_by_force_is_no_lost_machine():
    world = admitted()
    world.pass_time(seconds=20)
    set_suspended(world, True)
    world.remove("train-0-abcde")
    world.vanish("train-1-abcde")
    resume(world, 0, 1)
    (end,) = world.job.status.attempts
    assert (end.reason, end.counted) == ("PodDeleted", False)
    assert "was removed from machine node-1, but may still run there" in end.message
    assert start(world, "train-0-fghij") == ""


def test_a_silent_node_of_the_new_pods_has_time_to_recover():
    world = admitted()
    world.pass_time(seconds=20)
    suspend(world)
    world.containers_stop()
    resume(world, 0, 1)
    assert world.phase == "Running"
    world.node("node-3", False)
    world.settle()
    assert (world.phase, world.job.status.attempt) == ("Running", 0)
    assert [w.node for w in world.job.status.unfenced] == ["node-3"]


def test_without_a_suspension_a_vanished_worker_is_left_to_the_job_controller():
    world = running()
    world.node("node-1", False)
    world.vanish("train-1-abcde")
    world.settle()
    assert world.job.status.attempt == 0
    assert [w.node for w in world.job.status.unfenced] == ["node-1"]


def test_an_attempt_that_has_ended_is_not_resumed_while_the_next_one_waits():
    world = admitted(maxRestarts=0)
    world.node("node-1", False)
    world.pass_time(seconds=20)
    suspend(world)
    queue, world.queue = world.queue, None
    world.pass_time(seconds=20)
    world.settle_twice()
    assert [end.reason for end in world.job.status.attempts] == ["NodeLost"]
    assert (JOBS.plural, "train") not in world.objects, "Kueue would resume it"
    world.node("node-1", True, OUT_OF_SERVICE)
    world.containers_stop()
    world.queue = queue
    world.settle_twice()
    assert world.job.status.attempt == 1


def test_the_running_time_ends_with_the_suspension_and_not_with_a_later_loss():
    world = admitted()
    world.pass_time(seconds=600)
    world.settle()
    set_suspended(world, True)
    for pod in world.workers():
        world._released((PODS.plural, pod.metadata.name), 300)
    running_seconds = int(
        (world.now - world.condition("Running").last_transition_time).total_seconds()
    )
    world.pass_time(seconds=100)
    world.node("node-1", False)
    world.pass_time(seconds=60)
    world.settle()
    assert [end.reason for end in world.job.status.attempts] == ["NodeLost"]
    assert world.job.status.running_seconds == running_seconds
