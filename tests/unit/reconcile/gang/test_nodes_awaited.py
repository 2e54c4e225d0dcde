"""A controller that has not read the machines yet, although it may, decides nothing that needs them."""

from unit.reconcile.losing import running
from world import World, make_job, make_queue


def forget_nodes(world: World) -> dict[str, object]:
    """The watch of nodes is dead, or the controller has just started."""
    nodes, world.nodes, world.nodes_awaited = world.nodes, None, True
    assert nodes is not None
    return nodes


def test_the_first_gang_does_not_wait_for_the_nodes():
    world = World(make_job(numNodes=2), make_queue())
    world.nodes_awaited = True
    world.settle()
    assert len(world.gangs) == 1


def lose_unseen(world: World) -> dict[str, object]:
    """A Node and its pod vanish, and the Job fails, while the nodes are awaited."""
    nodes = forget_nodes(world)
    del nodes["node-1"]
    world.vanish("train-1-abcde")
    world.job_condition("Failed", "BackoffLimitExceeded")
    world.settle()
    world.containers_stop()
    world.pass_time(minutes=2)
    world.settle()
    return nodes


def test_a_gang_that_follows_another_waits_until_lost_nodes_are_known():
    world = running()
    nodes = lose_unseen(world)
    assert world.settle().requeue_after == 10
    assert (world.job.status.reason, len(world.gangs)) == ("NodesNotRead", 1)
    assert world.job.status.worker_nodes == ("node-0", "node-1")
    world.nodes, world.nodes_awaited = nodes, False
    world.settle()
    assert [(w.index, w.node) for w in world.job.status.unfenced] == [(1, "node-1")]
    assert world.job.status.reason == "WaitingForFence"


def test_a_job_that_allows_an_unfenced_restart_does_not_wait_for_the_nodes():
    world = running(allowUnfencedRestart=True)
    lose_unseen(world)
    assert len(world.gangs) == 2


def test_the_memory_of_an_earlier_attempt_is_not_that_of_the_present_one():
    world = running()
    world.pod("train-0-abcde", phase="Failed")
    world.pass_backoff()
    world.step(writes=2)  # the process dies before it writes a status
    assert len(world.gangs) == 2
    forget_nodes(world)
    world.settle()
    assert (world.job.status.attempt, world.job.status.worker_nodes) == (1, ())
