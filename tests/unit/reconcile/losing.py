"""Gangs with one node for each worker, and lost machines."""

from typing import Any

from world import ZIP, World, make_job, make_queue

OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"


def begin(world: World) -> None:
    """Run every worker of the latest gang, each on its own node."""
    for index, pod in enumerate(world.workers()):
        world.place(pod.metadata.name, f"node-{index}")
    world.all_workers("Running")
    world.settle()


def running(nodes: int = 2, *, zipped: bool = False, **reliability: object) -> World:
    spec: dict[str, object] = {"volumes": ZIP} if zipped else {}
    world = World(make_job(numNodes=nodes, reliability=reliability, **spec), make_queue())
    for index in range(max(4, nodes)):
        world.node(f"node-{index}")
    if zipped:
        world.step()
        world.sync_done()
    world.settle()
    begin(world)
    assert world.phase == "Running"
    return world


def lose(world: World, node: str = "node-1") -> None:
    """The node is NotReady long enough to be lost."""
    world.node(node, False)
    world.settle()
    world.pass_time(seconds=40)
    world.settle()


def replaced(**spec: Any) -> World:
    """The new gang is scheduled elsewhere, and pods on healthy nodes have ended."""
    world = running(**spec)
    lose(world)
    world.containers_stop()
    for index, pod in enumerate(world.workers()):
        world.place(pod.metadata.name, f"node-{index + 2}")
    world.all_workers("Running")
    world.settle()
    return world


def started(world: World) -> set[str]:
    return {pod.metadata.annotations.start for pod in world.leaders()}
