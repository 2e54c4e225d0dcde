"""A job in a queue with a quota, before and after its admission."""

from world import World, make_job, make_queue

QUOTA = {"quota": {"nodes": 8}}


def submitted(queue: dict[str, object] | None = None, **spec: object) -> World:
    world = World(make_job(**{"numNodes": 2, **spec}), make_queue(**(queue or QUOTA)))
    world.settle()
    return world


def running(queue: dict[str, object] | None = None, **spec: object) -> World:
    world = submitted(queue, **spec)
    world.admit(world.job.spec.num_nodes or 1)
    world.settle()
    world.all_workers("Running")
    world.settle()
    assert world.phase == "Running"
    return world
