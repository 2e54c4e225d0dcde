"""Which jobs keep a deleted queue: a queue in deletion admits none, so it must not wait for that."""

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from admitting import running
from queue_lab import pods_of
from torchrun_api import names
from torchrun_api.kinds.job import JobNodeResources
from torchrun_controller.reconcile.admission.coordinator import admit
from torchrun_controller.reconcile.admission.inputs import ClassifiedJob, cluster_state
from torchrun_controller.reconcile.admission.model import Preemption
from torchrun_controller.reconcile.admission.statuses import JobUpdates
from torchrun_controller.reconcile.queue import ObservedQueue, QueuePlan, finalizer
from torchrun_controller.reconcile.queue.model import needs_queue, state_of
from torchrun_controller.reconcile.spec.admission_status import WAITING, charged
from unit.reconcile.admission.classifying import classify_world, deliver
from world import World


def delete_queue(world: World) -> None:
    assert world.queue is not None
    meta = replace(
        world.queue.metadata, deletion_timestamp=world.now, finalizers=(names.QUEUE_FINALIZER,)
    )
    world.queue = replace(world.queue, metadata=meta)


def reconcile_queue(world: World) -> QueuePlan:
    """Reconcile the deleted queue, which is gone once its finalizer is removed."""
    assert world.queue is not None
    plan = finalizer.finalize(ObservedQueue(queue=world.queue, jobs=(world.job,)), world.now)
    if plan.applies:
        world.queue = None
    return plan


def coordinate(world: World) -> None:
    """Let the coordinator decide about the job, until it has nothing to write."""
    for _ in range(9):
        world.settle()
        classification = classify_world(world)
        entries = (ClassifiedJob(world.job, classification),)
        queues = () if world.queue is None else (world.queue,)
        decisions = admit(cluster_state(queues, entries, (), None, world.now), world.now)
        update = JobUpdates(decisions).update(world.job, classification, world.now)
        if update is None:
            return
        deliver(world, grants=decisions.grants, pending=decisions.pending)
    raise AssertionError(f"no rest: {world.job.status}")


def preempt(world: World) -> None:
    preemption = Preemption(uid="uid-train", for_uid="x", reason="Reclaimed", message="Quota.")
    deliver(world, preemptions=(preemption,))
    world.settle()
    assert (world.phase, needs_queue(world.job)) == ("Preempted", True), "its pods run"
    world.vanish(*(pod.metadata.name for pod in pods_of(world)))


def outgrow(world: World) -> None:
    """The next gang asks for more than was admitted."""
    world.spec(node_resources=JobNodeResources(cpus="2"))
    fail(world)
    world.settle()
    assert (world.condition("AdmissionRequested").reason, charged(world.job)) == (WAITING, 2)
    assert needs_queue(world.job), "the admission may be enough after another edit"


def fail(world: World) -> None:
    """The latest gang fails, and none of its pods is left."""
    world.job_condition("Failed", "BackoffLimitExceeded")
    world.vanish(*(pod.metadata.name for pod in pods_of(world)))


def suspend_and_resume(world: World) -> None:
    world.suspend()
    world.vanish(*(pod.metadata.name for pod in pods_of(world)))
    coordinate(world)
    assert (world.phase, charged(world.job)) == ("Suspended", 0)
    world.resume()


@pytest.mark.parametrize("stop", [preempt, outgrow, suspend_and_resume])
def test_a_deleted_queue_does_not_wait_for_a_job_that_waits_for_admission(
    stop: Callable[[World], None],
) -> None:
    world = running()
    delete_queue(world)
    stop(world)
    coordinate(world)
    assert (world.condition("Admitted").reason, charged(world.job)) == ("QueuePaused", 0)
    assert state_of(world.job) == "pending"
    reconcile_queue(world)
    assert world.queue is None
    coordinate(world)
    assert (world.phase, world.job.status.reason) == ("Pending", "QueueNotFound")


def test_a_deleted_queue_waits_for_the_pods_of_a_job_that_waits_for_admission() -> None:
    """A gang that ran when its queue began to take part in admission has no charge."""
    world = running()
    delete_queue(world)
    preempt(world)
    coordinate(world)
    workers = world.job.status.workers
    assert workers is not None
    status = replace(world.job.status, workers=replace(workers, running=1))
    assert needs_queue(replace(world.job, status=status))


def test_a_deleted_queue_waits_for_a_job_in_back_off() -> None:
    """It has its admission, so it restarts in the deleted queue."""
    world = running()
    delete_queue(world)
    fail(world)
    coordinate(world)
    fail(world)
    world.rest()
    assert (world.phase, world.job.status.reason) == ("Queued", "BackingOff")
    assert reconcile_queue(world).applies == ()
    coordinate(world)
    assert (len(world.gangs), charged(world.job)) == (3, 2)
    reconcile_queue(world)
    assert world.queue is not None


def test_a_job_that_may_not_restart_ends_in_the_deleted_queue() -> None:
    queue = {"quota": {"nodes": 8}, "reliability": {"restartPolicy": "Never"}}
    world = running(queue)
    delete_queue(world)
    world.pod(world.workers()[0].metadata.name, phase="Failed")
    world.settle()
    assert world.phase == "Failed"
    reconcile_queue(world)
    assert world.queue is None
