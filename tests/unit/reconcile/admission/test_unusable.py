"""An admitted job that can have no gang, or whose gang cannot start: it returns its admission."""

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from admitting import running, submitted
from queue_lab import pods_of
from torchrun_api.kinds.resources import JOBS, SERVICES
from torchrun_controller.reconcile.admission.statuses import Stage
from torchrun_controller.reconcile.model.observed import Conflict, Installed, Rejection
from torchrun_controller.reconcile.spec import admission_status
from torchrun_controller.reconcile.spec.admission_status import charged
from unit.reconcile.admission.classifying import classify_world, deliver, status_update
from world import ZIP, World, make_queue

LIMITED = {"quota": {"nodes": 8}, "limits": {"maxPriority": 1}}


def delete_queue(world: World) -> None:
    world.queue = None


def terminate_queue(world: World) -> None:
    assert world.queue is not None
    meta = replace(world.queue.metadata, deletion_timestamp=world.now)
    world.queue = replace(world.queue, metadata=meta)


def lower_limit(world: World) -> None:
    world.queue = make_queue(**LIMITED)


def invalidate_job(world: World) -> None:
    world.job = replace(world.job, invalid="spec.x: what is that?")


def refuse_job(world: World) -> None:
    world.rejections = (Rejection("jobs.batch", "train", "volumeMounts[2].name: Not found"),)


def take_name(world: World) -> None:
    world.conflicts = (Conflict("jobs.batch", "train", "Job train exists"),)


def uninstall_scheduler(world: World) -> None:
    assert world.queue is not None
    world.queue = make_queue(quota={"nodes": 8}, scheduling={"gang": "volcano"})
    world.installed = Installed()


def admitted_job() -> World:
    world = submitted(priority=5)
    world.admit(2)
    return world


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (delete_queue, "QueueNotFound"),
        (terminate_queue, "QueueTerminating"),
        (lower_limit, "InvalidSpec"),
        (invalidate_job, "InvalidSpec"),
        (refuse_job, "Rejected"),
        (take_name, "NameConflict"),
        (uninstall_scheduler, "GangSchedulerMissing"),
    ],
)
def test_a_job_that_can_have_no_gang_returns_its_admission(
    change: Callable[[World], None], reason: str
):
    world = admitted_job()
    change(world)
    world.settle()
    assert (world.phase, world.job.status.reason) == ("Pending", reason)
    assert deliver(world) is Stage.REPORT
    assert world.condition("Admitted").reason == admission_status.OUTDATED
    assert charged(world.job) == 2, "a gang may be in creation"
    assert not classify_world(world).requeued
    world.settle()
    assert deliver(world) is Stage.RELEASE
    assert charged(world.job) == 0
    world.settle()
    assert [c.type for c in world.job.status.conditions].count("AdmissionRequested") == 0
    assert status_update(world) is None or deliver(world) is Stage.REPORT
    assert (world.gangs, world.job.status.reason) == ([], reason)


def test_the_job_waits_again_once_it_can_have_a_gang():
    world = admitted_job()
    delete_queue(world)
    world.settle()
    deliver(world)
    world.queue = make_queue(quota={"nodes": 8})
    world.settle()
    assert world.gangs == []
    assert deliver(world) is Stage.RELEASE
    world.settle()
    workload = classify_world(world).workload
    assert (workload.admitted, workload.nodes) == (0, 2)


def test_a_job_that_has_a_queue_again_keeps_its_admission():
    world = admitted_job()
    delete_queue(world)
    world.settle()
    world.queue = make_queue(quota={"nodes": 8})
    world.settle()
    assert (len(world.gangs), charged(world.job)) == (1, 2)
    assert classify_world(world).outdated == ""


def test_a_gang_that_exists_keeps_its_admission():
    world = running(priority=5)
    lower_limit(world)
    world.settle()
    assert (world.phase, charged(world.job)) == ("Running", 2)
    assert classify_world(world).outdated == ""


def test_pods_of_the_last_gang_keep_the_admission():
    world = running(priority=5)
    delete_queue(world)
    (child,) = world.gangs
    del world.objects["jobs", child.metadata.name]
    world.settle()
    assert classify_world(world).outdated == ""
    world.vanish(*(pod.metadata.name for pod in pods_of(world)))
    world.settle()
    assert world.job.status.reason == "QueueNotFound"
    assert classify_world(world).outdated != ""


def test_a_job_that_has_run_is_not_advised_to_choose_another_queue():
    world = running()
    delete_queue(world)
    world.delete_child_job()
    world.pass_time(seconds=3600)
    world.settle()
    assert world.job.status.message == (
        "TorchrunQueue gpu does not exist in namespace ml. Create it."
    )


def pull_fails(world: World) -> None:
    for pod in world.workers():
        world.placed(pod.metadata.name)
        world.container_waits(pod.metadata.name, "ImagePullBackOff", "not found")


def pod_is_refused(world: World) -> None:
    world.vanish(*(pod.metadata.name for pod in world.workers()))
    world.warn(JOBS, "train", "FailedCreate", 'pods "x" is forbidden: violates PodSecurity')


def pull_is_slow(world: World) -> None:
    for pod in world.workers():
        world.placed(pod.metadata.name)
        world.container_waits(pod.metadata.name, "ContainerCreating")


def machines_are_full(world: World) -> None:
    world.not_placed("0/3 nodes are available: 3 Insufficient nvidia.com/gpu.")


def service_name_taken(world: World) -> None:
    del world.objects[SERVICES.plural, "train"]
    world.job = replace(world.job, status=replace(world.job.status, workers=None, phase="Queued"))
    world.conflicts = (Conflict(SERVICES.resource, "train", "it belongs to another"),)


def gang_with(trouble: Callable[[World], None]) -> World:
    """An admitted gang that has been in trouble for 29 minutes."""
    world = admitted_job()
    world.suffix = "bcdfg"
    world.settle()
    trouble(world)
    world.settle()
    world.pass_time(minutes=29)
    world.settle()
    assert (len(world.gangs), charged(world.job)) == (1, 2)
    return world


def postponed() -> World:
    """The gang of this job could not start, and its admission is returned."""
    world = gang_with(pull_fails)
    world.pass_time(minutes=1)
    world.settle()
    world.containers_stop()
    world.settle()
    assert (deliver(world), charged(world.job)) == (Stage.REPORT, 2)
    world.settle()
    assert (deliver(world), charged(world.job)) == (Stage.RELEASE, 0)
    world.settle()
    assert (world.phase, world.job.status.reason) == ("Queued", "StartTimeout")
    assert not world.observed().gang.child_jobs
    return world


@pytest.mark.parametrize("trouble", [pull_fails, pod_is_refused, service_name_taken])
def test_a_gang_that_somebody_has_to_help_does_not_keep_its_quota(
    trouble: Callable[[World], None],
) -> None:
    world = gang_with(trouble)
    world.pass_time(minutes=1)
    world.settle()
    world.containers_stop()
    world.settle()
    assert not world.observed().gang.child_jobs
    status = world.job.status
    assert status.reason == "StartTimeout"
    assert (status.restarts, status.disruptions) == (0, 0)
    assert world.condition("AdmissionRequested").reason == admission_status.UNUSABLE


@pytest.mark.parametrize("trouble", [pull_is_slow, machines_are_full])
def test_a_gang_that_only_takes_long_keeps_its_quota(trouble: Callable[[World], None]) -> None:
    world = gang_with(trouble)
    world.pass_time(days=30)
    world.settle()
    assert (world.phase, len(world.gangs), charged(world.job)) == ("Queued", 1, 2)


def test_a_workspace_that_never_comes_does_not_keep_the_quota() -> None:
    world = submitted(volumes=ZIP)
    world.admit(2)
    world.settle()
    assert world.phase == "Syncing"
    assert "AdmissionRequested" not in [c.type for c in world.job.status.conditions]
    world.pass_time(minutes=30)
    world.settle()
    assert world.condition("AdmissionRequested").reason == admission_status.UNUSABLE


def edit(world: World) -> None:
    world.spec(image="trainer:2")


def suspend_and_resume(world: World) -> None:
    world.suspend()
    world.settle()
    world.resume()


def wait(world: World) -> None:
    world.pass_time(minutes=30)


@pytest.mark.parametrize("action", [edit, suspend_and_resume, wait])
def test_a_postponed_job_requests_admission_again(action: Callable[[World], None]) -> None:
    world = postponed()
    world.pass_time(minutes=29)
    world.settle()
    assert "AdmissionRequested" not in [c.type for c in world.job.status.conditions]
    action(world)
    world.settle_twice()
    assert world.condition("AdmissionRequested").reason == admission_status.WAITING


def test_a_job_that_never_starts_gives_way_for_longer_each_time() -> None:
    world = postponed()
    waits = []
    for _ in range(6):
        start = world.now
        while "AdmissionRequested" not in [c.type for c in world.job.status.conditions]:
            world.pass_time(minutes=10)
            world.settle()
        waits.append((world.now - start).total_seconds() / 3600)
        world.admit(2)
        world.settle()
        pull_fails(world)
        world.pass_time(minutes=30)
        world.settle()
        world.containers_stop()
        world.settle()
        for _ in range(2):
            deliver(world)
            world.settle()
    assert waits == [0.5, 1, 2, 4, 8, 8]
