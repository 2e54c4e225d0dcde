"""The delay before a restart: how it grows, and what resets it."""

from unit.reconcile.failing import fail, running


def test_delays_grow_and_a_long_gang_resets_them():
    world = running(maxRestarts=20)
    waits = []
    for _ in range(9):
        fail(world)
        plan = world.rest()
        waits.append(plan.requeue_after or 0)
        if waits[-1]:
            assert world.phase == "Queued", "the job has not failed: another gang follows"
            assert (world.job.status.reason) == "BackingOff"
            placed = next(c for c in world.job.status.conditions if c.type == "Scheduled")
            assert (placed.status, placed.reason) == ("False", "BackingOff"), "there are no pods"
        world.pass_time(seconds=waits[-1])
        world.settle()
        world.containers_stop()
        world.all_workers("Running")
        world.settle()
    assert waits == [0, 10, 20, 40, 80, 160, 300, 300, 300]
    world.pass_time(minutes=11)
    fail(world)
    assert world.rest().requeue_after is None
    assert world.phase == "Queued"
    world.containers_stop()
    world.all_workers("Running")
    world.settle()
    fail(world)
    assert world.rest().requeue_after is None, "the first failure after a long run"


def test_a_suspension_does_not_delay_the_next_restart():
    world = running()
    world.suspend()
    world.resume()
    world.all_workers("Running")
    world.settle()
    fail(world)
    assert world.settle().requeue_after is None
    assert world.job.status.attempt == 2
