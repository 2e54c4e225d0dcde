"""What the steps of a reconcile share."""

from unit.reconcile.test_invariants import Histories, Reaction


def test_the_end_of_a_gang_that_no_status_recorded_is_counted_once() -> None:
    history = Histories()
    history.submit(nodes=2, zipped=True, max_restarts=0, setup=False, queue=True)
    history.nothing(reaction=Reaction.ONE_RECONCILE)
    history.sync_pod_changes(phase="Running", reaction=Reaction.NONE_YET)
    history.sync_pod_changes(phase="Succeeded", reaction=Reaction.KILLED_BEFORE_STATUS)
    history.child_job_is_deleted(reaction=Reaction.KILLED_BEFORE_STATUS)
    history.gang_is_force_deleted(reaction=Reaction.NONE_YET)
    history.sync_pod_is_deleted(reaction=Reaction.ONE_RECONCILE)
    world = history.world
    assert [end.number for end in world.job.status.attempts] == [world.job.status.attempt]
    ends = world.job.status.attempts
    history.child_job_is_deleted(reaction=Reaction.TO_THE_END)
    assert world.job.status.attempts == ends
    assert (world.job.status.attempt, world.job.status.disruptions) == (1, 1)
