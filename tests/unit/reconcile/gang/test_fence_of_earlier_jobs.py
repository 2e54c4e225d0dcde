"""Pods of an earlier job of the same name, and workers without proof of a fence."""

from datetime import datetime, timedelta

import pytest
from msgspec.structs import replace

from torchrun_api.kinds.meta import OwnerReference
from torchrun_api.kinds.status import UnfencedWorker
from torchrun_controller.reconcile.gang import fence
from unit.reconcile.losing import replaced, running
from world import START, World

SECOND = timedelta(seconds=1)


def orphaned(world: World, made: datetime | None, own: datetime | None) -> bool:
    """The result for a pod without a child Job. `made` and `own`: ages of pod and job."""
    world.job = replace(world.job, metadata=replace(world.job.metadata, creation_timestamp=own))
    pod = world.workers()[0]
    other = (OwnerReference(kind="Job", uid="uid-of-another", controller=True),)
    meta = replace(pod.metadata, owner_references=other, creation_timestamp=made)
    return fence.of_earlier_job(world.job, world.observed().gang, replace(pod, metadata=meta))


@pytest.mark.parametrize(
    ("made", "own", "expected"),
    [
        (START - SECOND, START, True),
        (START, START, True),  # API times have whole seconds
        (START + SECOND, START, False),
        (None, START, False),
        (START, None, False),
    ],
)
def test_a_pod_without_its_job_is_assigned_by_its_age(
    made: datetime | None, own: datetime | None, expected: bool
):
    assert orphaned(running(), made, own) is expected


def test_a_pod_with_a_child_job_belongs_to_this_job():
    world = running()
    pod = world.workers()[0]
    old = replace(pod.metadata, creation_timestamp=START - 100 * SECOND)
    assert not fence.of_earlier_job(world.job, world.observed().gang, replace(pod, metadata=old))


def test_a_missing_proof_is_about_earlier_gangs():
    world = replaced(zipped=True)
    (before,) = world.job.status.unfenced
    own = UnfencedWorker(attempt=1, index=1, node="node-9", since=world.now)
    world.job = replace(world.job, status=replace(world.job.status, unfenced=(before, own)))
    for pod in world.workers():
        world.end_container(
            pod.metadata.name,
            "trainer",
            exit_code=125,
            message='{"exitCode": 125, "reason": "FenceUnproven", "message": "no proof"}',
        )
    world.step()
    unproven = {(w.attempt, w.index): w.unproven for w in world.job.status.unfenced}
    assert (unproven[0, 1], unproven[1, 1]) == (True, False)
