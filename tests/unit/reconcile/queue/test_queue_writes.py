"""The requests of a queue: its dry run, KAI queue and status, stored beside the tests.

`pytest --update-golden` rewrites them. Read the diff before you commit it.
"""

from collections.abc import Callable
from typing import TypeAlias

import pytest
from msgspec.structs import replace

from queue_world import KAI, a_job, kai_queue, make_trq
from shell_world import GOLDEN, ShellQueueWorld, Shortener, as_documents, compare
from world import DEFAULTS


def plain() -> ShellQueueWorld:
    return ShellQueueWorld(make_trq())


def with_everything() -> ShellQueueWorld:
    queue = make_trq(
        kaiQueue="vision",
        nodeResources={"gpus": 8, "cpus": 96, "memory": "512Gi"},
        quota={"gpus": 64, "memory": "4Ti"},
        weight=3,
        scheduling={"scheduler": "kai-scheduler"},
    )
    world = ShellQueueWorld(queue, KAI)
    world.defaults = replace(DEFAULTS, kai_quota_namespaces=("ml",))
    assert world.kai is not None
    world.kai["default"] = kai_queue("default")
    world.jobs = [a_job("run", "Running", gang=True), a_job("waits")]
    return world


def end_jobs(world: ShellQueueWorld) -> None:
    world.jobs = []


Step: TypeAlias = tuple[str, Callable[[ShellQueueWorld], None]]

CREATE: Step = ("the user creates the queue", lambda world: None)
CASES: dict[str, tuple[Callable[[], ShellQueueWorld], *tuple[Step, ...]]] = {
    "plain": (plain, CREATE),
    "with-everything": (
        with_everything,
        CREATE,
        ("the user deletes the queue", ShellQueueWorld.delete),
        ("its jobs end", end_jobs),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_requests_of_a_queue(name, pytestconfig):
    make, *steps = CASES[name]
    world, shortener, sent = make(), Shortener(), []
    for what, act in steps:
        act(world)
        world.settle()
        sent.append((what, shortener.shorten(world.api.take())))
    compare(as_documents(sent), GOLDEN / "queues" / f"{name}.yaml", pytestconfig)
