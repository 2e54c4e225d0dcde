"""A status that the API server refuses for good does not keep a gang running, or a reason secret."""

from collections.abc import Callable

import pytest

from shell_world import ShellWorld
from torchrun_api.kinds.resources import JOBS, TORCHRUN_JOBS
from torchrun_controller.controllers.refusals import STATUS_RETRY
from unit.controllers.test_refusals import attempts, events, refuse
from world import make_job, make_queue

STATUS = f"{TORCHRUN_JOBS.path('ml', 'train')}/status"
TOO_LARGE = (413, "the object is too large")
INVALID = (422, "a policy forbids this message")
FOR_ETCD = (500, "etcdserver: request is too large")


def suspend(world: ShellWorld) -> None:
    world.spec(suspend=True)


def exceed_the_deadline(world: ShellWorld) -> None:
    world.pass_time(seconds=60)


def fail(world: ShellWorld) -> None:
    world.all_workers("Failed")


@pytest.mark.parametrize("answer", [TOO_LARGE, INVALID, FOR_ETCD])
@pytest.mark.parametrize("happens", [suspend, exceed_the_deadline, fail])
@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_a_gang_ends_although_its_status_is_refused(
    nodes: int, seen: bool, happens: Callable[[ShellWorld], None], answer: tuple[int, str]
) -> None:
    reliability = {"activeDeadlineSeconds": 60, "maxRestarts": 0}
    world = ShellWorld(make_job(numNodes=nodes, reliability=reliability), make_queue())
    if not seen:
        refuse(world, STATUS, answer=answer)
    world.attempt()
    world.all_workers("Running")
    attempts(world, 1) if seen else world.attempt()
    refuse(world, STATUS, answer=answer)
    happens(world)
    attempts(world, 20)
    alive = [pod for pod in world.workers() if not pod.metadata.terminating]
    assert (JOBS.plural, "train") not in world.objects or happens is fail or not alive
    refused = [event for event in events(world) if event.startswith("Warning StatusRefused")]
    assert 3 < len(refused) < 12
    assert answer[1] in refused[0]


def test_the_status_is_written_once_it_is_accepted() -> None:
    world = ShellWorld(make_job(numNodes=2), make_queue())
    world.attempt()
    refuse(world, STATUS, answer=TOO_LARGE)
    world.all_workers("Running")
    world.attempt()
    assert world.phase == "Queued"
    world.api.refused = {}
    world.pass_time(seconds=STATUS_RETRY)
    world.attempt()
    assert world.phase == "Running"
