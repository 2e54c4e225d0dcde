"""Gangs that end while a pod is on a lost machine, and jobs that are being deleted."""

from msgspec.structs import replace

from admitting import running
from torchrun_api.kinds.core import Job, Pod
from torchrun_controller.reconcile.admission.model import Preemption
from torchrun_controller.reconcile.admission.statuses import Stage
from torchrun_controller.reconcile.spec.admission_status import charged
from unit.reconcile.admission.classifying import classify_world, deliver, status_update
from world import World, make_queue

LOST = frozenset({"n1"})
MINUTE = 60
GIVES_WAY = Preemption(
    uid="uid-train", for_uid="uid-urgent", reason="HigherPriority", message="for urgent"
)


def with_a_lost_node() -> World:
    """A running job with its pods on two nodes, one of which is lost."""
    world = running()
    for number, pod in enumerate(world.workers()):
        world.node(f"n{number}")
        world.place(pod.metadata.name, f"n{number}")
    world.settle()
    world.node("n1", False)
    return world


def delete_in_foreground(world: World) -> None:
    """The garbage collector deletes pods, Jobs wait for them. The kubelet of n0 ends its pod."""
    for key, value in list(world.objects.items()):
        if isinstance(value, Job | Pod):
            meta = replace(value.metadata, deletion_timestamp=world.now)
            world.objects[key] = replace(value, metadata=meta)
    world.vanish(world.workers()[0].metadata.name)


def delete_job(world: World) -> None:
    """The user deletes the TorchrunJob, which a finalizer keeps."""
    meta = replace(world.job.metadata, deletion_timestamp=world.now)
    world.job = replace(world.job, metadata=meta)


class TestPodsOnLostNodes:
    def test_a_preempted_gang_whose_job_is_being_deleted_has_ended(self):
        world = with_a_lost_node()
        deliver(world, preemptions=(GIVES_WAY,))
        world.step()
        delete_in_foreground(world)
        world.pass_time(seconds=10 * MINUTE)
        world.settle()
        assert [pod.spec.node_name for pod in world.workers()] == ["n1"], "it cannot end"
        assert classify_world(world, LOST).requeued

    def test_a_failed_gang_with_an_outdated_admission_has_ended(self):
        world = with_a_lost_node()
        world.queue = make_queue(quota={"nodes": 8}, nodeResources={"cpus": "8"})
        world.pass_time(seconds=10 * MINUTE)
        world.settle()
        world.vanish(world.workers()[0].metadata.name)
        world.job_condition("FailureTarget")
        world.pass_time(seconds=10 * MINUTE)
        world.settle()
        assert [pod.spec.node_name for pod in world.workers()] == ["n1"], "it cannot end"
        assert "but was admitted with" in classify_world(world, LOST).outdated

    def test_a_gang_whose_job_may_create_pods_has_not_ended(self):
        world = with_a_lost_node()
        world.vanish(*(pod.metadata.name for pod in world.workers()))
        assert classify_world(world, LOST).workload.admitted == 2


class TestDeletedJobs:
    def test_a_job_that_is_being_deleted_is_not_preempted(self):
        world = running()
        assert not classify_world(world).workload.is_deleted
        delete_job(world)
        assert classify_world(world).workload.is_deleted

    def test_a_preempted_job_that_is_being_deleted_frees_nothing_for_another(self):
        """Reconcile no longer ends its gang, and its finalizer may stay for long."""
        world = running()
        deliver(world, preemptions=(GIVES_WAY,))
        delete_job(world)
        workload = classify_world(world).workload
        assert (workload.is_deleted, workload.preempted_for) == (True, "")
        assert status_update(world) is None

    def test_a_job_that_is_being_deleted_is_charged_while_its_gang_runs(self):
        world = with_a_lost_node()
        delete_job(world)
        assert classify_world(world, LOST).workload.admitted == 2
        delete_in_foreground(world)
        assert deliver_lost(world) is Stage.RELEASE
        assert charged(world.job) == 0


def deliver_lost(world: World) -> Stage:
    """Deliver the decision once the pod on the lost machine counts as ended."""
    assert classify_world(world, LOST).workload is None
    world.vanish(*(pod.metadata.name for pod in world.workers()))
    return deliver(world)
