"""The success of a gang with a pod that has replaced a lost one."""

from unit.reconcile.replacing import gangs, replace_lost, run, running, stop


def test_a_new_pod_that_succeeds_before_the_job_is_complete_is_not_lost():
    world = running()
    stop(world, 1)
    replace_lost(world)
    run(world)
    for pod in world.workers():
        world.pod(pod.metadata.name, phase="Succeeded")
        world.settle()
    assert (gangs(world), world.job.status.attempt) == (1, 0)
    world.job_condition("Complete")
    world.settle()
    assert world.phase == "Succeeded"
