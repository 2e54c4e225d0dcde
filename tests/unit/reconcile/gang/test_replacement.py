"""A lost pod is replaced alone: it is recorded and counted once, and then its gate opens."""

from unit.reconcile.replacing import (
    delete,
    gangs,
    limit,
    replace_lost,
    run,
    running,
)


def test_a_deleted_pod_is_replaced_and_the_others_keep_theirs():
    world = running()
    before = {pod.metadata.uid for pod in world.workers()}
    delete(world, 1)
    assert (world.phase, world.job.status.reason) == ("Queued", "ReplacingPods")
    assert world.job.status.attempts == (), "its end is not proven yet"
    lost = world.workers()[1].metadata
    world.containers_stop()
    world.settle()
    (end,) = world.job.status.attempts
    assert end.lost_pod is not None
    assert (end.lost_pod.uid, end.lost_pod.index, end.lost_pod.replaced) == (lost.uid, 1, 0)
    assert (end.number, end.reason, end.counted) == (0, "PodDeleted", False)
    (new,) = replace_lost(world)
    assert new.metadata.annotations.start == "0/1", "the status has the end of the pod before it"
    run(world)
    status = world.job.status
    assert (world.phase, status.attempt, status.disruptions) == ("Running", 0, 1)
    assert len(before & {pod.metadata.uid for pod in world.workers()}) == 2
    assert gangs(world) == 1
    assert limit(world) > 0
