"""A TorchrunJob that a backup brought back: a new UID, none of its objects, with or without status."""

import pytest
from msgspec.structs import replace

from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.status import TorchrunJobStatus
from world import ZIP, World, make_job, make_queue


def running(**spec: object) -> World:
    world = World(make_job(numNodes=2, **spec), make_queue())
    world.settle()
    if "volumes" in spec:
        world.takes_upload()
        world.sync_done()
        world.settle()
    world.all_workers("Running")
    world.settle()
    assert world.phase == "Running"
    return world


def restore(job: TorchrunJob, *, with_status: bool) -> World:
    """The job without its objects, and a controller that sees it for the first time."""
    metadata = replace(job.metadata, uid="uid-restored", resource_version="1")
    status = job.status if with_status else TorchrunJobStatus()
    world = World(replace(job, metadata=metadata, status=status), make_queue())
    world.settle()
    return world


def test_a_finished_job_runs_again_only_without_its_status() -> None:
    world = running()
    world.all_workers("Succeeded")
    world.job_condition("Complete")
    world.settle()
    assert world.phase == "Succeeded"
    assert restore(world.job, with_status=True).phase == "Succeeded"
    assert restore(world.job, with_status=False).phase == "Queued"


@pytest.mark.parametrize(("with_status", "attempt"), [(True, 1), (False, 0)])
def test_an_unfinished_job_continues_with_the_next_attempt(with_status: bool, attempt: int) -> None:
    world = restore(running().job, with_status=with_status)
    status = world.job.status
    assert (status.phase, status.attempt, status.restarts) == ("Queued", attempt, 0)
    assert [end.reason for end in status.attempts] == ["JobDeleted"] * attempt


def test_with_restart_policy_never_it_fails() -> None:
    world = restore(running(reliability={"restartPolicy": "Never"}).job, with_status=True)
    assert (world.phase, world.job.status.reason) == ("Failed", "JobDeleted")


def test_an_upload_is_requested_again() -> None:
    world = restore(running(volumes=ZIP).job, with_status=True)
    assert world.phase == "Syncing"
