"""Running gangs, and failures of their workers."""

from typing import Any

from torchrun_api.kinds.meta import Condition
from world import World, make_job, make_queue


def running(nodes: int = 2, **reliability: object) -> World:
    world = World(make_job(numNodes=nodes, reliability=reliability), make_queue())
    world.settle()
    world.all_workers("Running")
    world.settle()
    assert world.phase == "Running"
    return world


def fail(world: World, index: int = 0, **ended: Any) -> None:
    name = world.workers()[index].metadata.name
    world.end_container(name, "trainer", **{"exit_code": 1, "finished_at": world.now, **ended})


def disrupt(world: World, index: int = 0, reason: str = "EvictionByEvictionAPI") -> None:
    pod = world.workers()[index]
    condition = Condition(type="DisruptionTarget", status="True", reason=reason, message="drained")
    world.pod(pod.metadata.name, phase="Failed", conditions=(condition,))
