"""The running time of a gang ends with the gang, even if no controller sees that at once."""

from typing import Any

import pytest
from msgspec.structs import replace

from torchrun_api.kinds.core import ContainerState, ContainerStatus, StateRunning, StateWaiting
from torchrun_api.kinds.meta import Condition
from torchrun_api.kinds.resources import JOBS
from torchrun_controller.reconcile.gang.gate import REPEAT_SECONDS
from torchrun_controller.reconcile.model.observed import Installed
from torchrun_controller.reconcile.schedulers.kueue import KUEUE_WORKLOADS
from world import START, World, make_job, make_queue

KUEUE = Installed(resources=frozenset({(k.api_version, k.plural) for k in KUEUE_WORKLOADS}))
LIMIT = {"activeDeadlineSeconds": 3600}


def running(reliability: dict[str, Any] | None = None, queue: Any = None, **spec: Any) -> World:
    """A job with a limit of one hour that has run for ten minutes."""
    spec = {"numNodes": 2, "reliability": {**LIMIT, **(reliability or {})}, **spec}
    world = World(make_job(**spec), queue or make_queue())
    world.installed = KUEUE
    world.settle()
    if world.observed().gang.current_job.spec.suspend:
        world.resume_child("train")
        world.settle()
    world.all_workers("Running")
    world.settle_twice()
    assert (world.phase, world.condition("Running").last_transition_time) == ("Running", START)
    world.pass_time(seconds=600 - REPEAT_SECONDS)
    return world


def under_kueue(**spec: Any) -> World:
    return running(queue=make_queue(scheduling={"gang": "kueue"}), **spec)


def kueue_suspends(world: World) -> None:
    """Kueue suspends the child Job, and the Job controller deletes its pods."""
    child = world.objects[JOBS.plural, "train"]
    world.objects[JOBS.plural, "train"] = replace(child, spec=replace(child.spec, suspend=True))
    world.job_condition("Suspended", last_transition_time=world.now)
    world.vanish(*(pod.metadata.name for pod in world.workers()))


def rank_fails(world: World) -> None:
    world.end_container("train-0-abcde", "trainer", exit_code=1, finished_at=world.now)


def no_controller(world: World) -> None:
    """No controller runs for two hours."""
    world.pass_time(hours=2)
    world.step()


@pytest.mark.parametrize("broken", [False, True])
def test_a_container_that_never_starts_does_not_stop_the_clock(broken: bool) -> None:
    """The phase of such a pod is Pending, while its ranks run."""
    sidecar = {"containers": [{"name": "side", "image": "missing"}]} if broken else {}
    world = World(
        make_job(numNodes=2, podTemplate={"spec": sidecar}),
        make_queue(limits={"maxRunSeconds": 3600}),
    )
    world.settle()
    runs = ContainerState(running=StateRunning(started_at=world.now))
    waits = ContainerState(waiting=StateWaiting(reason="ImagePullBackOff", message="no image"))
    for pod in world.workers():
        world.placed(pod.metadata.name)
        world.pod(
            pod.metadata.name,
            phase="Pending" if broken else "Running",
            container_statuses=(
                ContainerStatus(name="trainer", state=runs),
                *((ContainerStatus(name="side", state=waits),) if broken else ()),
            ),
        )
    world.settle()
    world.pass_time(seconds=3599)
    world.settle()
    assert world.phase == "Running"
    assert ("no image" in world.job.status.message) == broken
    world.pass_time(seconds=1)
    world.settle()
    assert (world.phase, world.job.status.running_seconds) == ("TimedOut", 3600)


def test_a_failure_ends_the_running_time():
    world = running({"maxRestarts": 1})
    rank_fails(world)
    no_controller(world)
    status = world.job.status
    assert (status.phase, status.restarts, status.running_seconds) == ("Queued", 1, 600)
    assert [end.running_seconds for end in status.attempts] == [600]


def test_a_failure_before_the_deadline_fails_the_job():
    world = running({"maxRestarts": 0})
    rank_fails(world)
    no_controller(world)
    assert (world.phase, world.job.status.running_seconds) == ("Failed", 600)


def test_a_failure_after_the_deadline_is_too_late():
    world = running({"maxRestarts": 0})
    world.pass_time(seconds=3000)
    rank_fails(world)
    no_controller(world)
    assert (world.phase, world.job.status.running_seconds) == ("TimedOut", 3600)


def test_a_failed_job_without_pods_ends_the_running_time():
    world = running()
    world.vanish("train-0-abcde", "train-1-abcde")
    world.job_condition("Failed", "BackoffLimitExceeded", last_transition_time=world.now)
    no_controller(world)
    status = world.job.status
    assert (status.phase, status.disruptions, status.running_seconds) == ("Queued", 1, 600)


def test_a_failure_whose_cause_is_awaited_ends_the_running_time():
    world = running({"maxRestarts": 0})
    world.pass_time(seconds=2995)
    world.end_container(
        "train-0-abcde",
        "trainer",
        exit_code=1,
        finished_at=world.now,
        message='{"reason": "PeerFailed", "message": "A peer failed."}',
    )
    world.pass_time(seconds=6)
    world.step()
    assert (world.phase, world.plan().requeue_after) == ("Running", 4), "a peer may show the cause"
    world.pass_time(seconds=4)
    world.settle()
    assert (world.phase, world.job.status.running_seconds) == ("Failed", 3595)


def test_a_success_ends_the_running_time():
    world = running()
    world.all_workers("Succeeded")
    world.job_condition("Complete", last_transition_time=world.now)
    no_controller(world)
    assert (world.phase, world.job.status.running_seconds) == ("Succeeded", 600)


def test_a_failure_of_a_clock_behind_is_no_negative_time():
    world = running({"maxRestarts": 0})
    world.end_container("train-0-abcde", "trainer", exit_code=1, finished_at=START.replace(day=1))
    no_controller(world)
    assert (world.phase, world.job.status.running_seconds) == ("Failed", 0)


def test_a_failure_of_a_clock_ahead_is_now():
    world = running({"maxRestarts": 0})
    world.end_container("train-0-abcde", "trainer", exit_code=1, finished_at=START.replace(day=9))
    world.settle()
    assert (world.phase, world.job.status.running_seconds) == ("Failed", 600)


def test_a_suspension_by_kueue_ends_the_running_time():
    world = under_kueue()
    kueue_suspends(world)
    no_controller(world)
    status = world.job.status
    assert (status.phase, status.reason) == ("Preempted", "JobSuspended")
    assert status.running_seconds == 600
    world.resume_child("train")
    world.all_workers("Running")
    world.settle_twice()
    assert world.phase == "Running"
    assert world.settle().requeue_after == 3000 - REPEAT_SECONDS


def test_a_suspension_that_the_job_controller_has_not_seen_ends_the_running_time_now():
    world = under_kueue()
    child = world.objects[JOBS.plural, "train"]
    world.objects[JOBS.plural, "train"] = replace(child, spec=replace(child.spec, suspend=True))
    world.settle()
    assert (world.phase, world.job.status.running_seconds) == ("Preempted", 600)


@pytest.mark.parametrize("suspends", [True, False], ids=["suspension", "preemption"])
def test_the_end_of_a_suspended_gang_has_its_running_time(suspends):
    world = under_kueue()
    kueue_suspends(world)
    if suspends:
        world.spec(suspend=True)
    else:
        world.preempt()
    no_controller(world)
    world.settle()
    status = world.job.status
    assert status.phase == ("Suspended" if suspends else "Preempted")
    assert [end.running_seconds for end in status.attempts] == [600]
    assert status.running_seconds == 600


def test_the_grace_period_of_a_suspension_is_no_running_time():
    world = running()
    world.pass_time(seconds=2995)
    world.spec(suspend=True)
    world.settle()
    assert (world.phase, world.job.status.reason) == ("Running", "Suspending")
    world.pass_time(seconds=20)
    world.containers_stop()
    world.settle()
    status = world.job.status
    assert (status.phase, status.running_seconds) == ("Suspended", 3595)
    assert [end.running_seconds for end in status.attempts] == [3595]


def test_a_pause_by_kueue_that_no_controller_has_seen_is_no_running_time():
    world = under_kueue()
    world.pass_time(hours=2)
    child = world.objects[JOBS.plural, "train"]
    resumed = Condition(type="Suspended", status="False", last_transition_time=world.now)
    status = replace(child.status, conditions=(resumed,))
    world.objects[JOBS.plural, "train"] = replace(child, status=status)
    world.resume_child("train")
    world.all_workers("Running")
    world.pass_time(seconds=60)
    world.settle_twice()
    assert world.phase == "Running"
    assert world.settle().requeue_after == 3540 - REPEAT_SECONDS
    world.pass_time(seconds=3540 - REPEAT_SECONDS)
    world.settle()
    assert (world.phase, world.job.status.running_seconds) == ("TimedOut", 3600)
