"""An object that a newer version wrote: what this version cannot read it leaves as it is."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from queue_world import QueueWorld, make_trq
from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.queue import TorchrunQueue
from torchrun_controller.reconcile import Plan, StatusWrite
from torchrun_controller.reconcile.queue import QueuePlan
from torchrun_controller.watch.codec import Codec
from unit.reconcile.admission.classifying import classify_world
from unit.reconcile.failing import fail, running
from world import World, make_job, make_queue

Body = dict[str, Any]
Change = Callable[[Body], Any]


def seen(kind: Any, obj: TorchrunJob | TorchrunQueue, change: Change) -> Any:
    """The object as this version reads it, after a change by a newer one."""
    body: Body = msgspec.json.decode(msgspec.json.encode(obj))
    body["metadata"]["resourceVersion"] = "7"
    change(body)
    page = {"metadata": {"resourceVersion": "9"}, "items": [body]}
    (found,) = Codec(kind).page(msgspec.json.encode(page)).objects
    return found


def waiting() -> World:
    world = running(reliability={"maxRestarts": 1})
    world.suspend()
    return world


def failed() -> World:
    world = running(maxRestarts=0)
    fail(world)
    world.settle()
    assert world.phase == "Failed"
    return world


JOBS = pytest.mark.parametrize("make", [running, waiting, failed])


@JOBS
@pytest.mark.parametrize(
    "change",
    [
        lambda body: body["status"].update(phase="Paused"),
        lambda body: body["status"].update(attempt="the second"),
        lambda body: body["status"]["queuePolicy"].update(rules=[{"action": "wait"}]),
        lambda body: body["spec"]["reliability"].update(restartScope="Node"),
        lambda body: body["spec"].update(launcher="mpirun"),
    ],
)
def test_a_job_that_has_run_is_left_alone_and_reported(make: Callable[[], World], change: Change):
    world = make()
    world.job = seen(TorchrunJob, world.job, change)
    plan = world.plan()
    assert plan == Plan(writes=(StatusWrite(events=plan.events),))
    (event,) = plan.events
    assert (event.type, event.reason) == ("Warning", "Unreadable")
    assert "Upgrade the controller" in event.message


@JOBS
def test_a_new_value_that_decides_nothing_stays_in_the_status(make: Callable[[], World]):
    world = make()
    status = world.job.status
    world.job = seen(
        TorchrunJob,
        world.job,
        lambda body: body["status"]["queuePolicy"].update(restartPolicy="OnNodeFailure"),
    )
    world.settle()
    assert world.job.status.queue_policy.restart_policy == "OnNodeFailure"
    assert (world.phase, world.job.status.attempts) == (status.phase, status.attempts)


def test_a_new_job_with_an_unknown_value_is_told_in_its_status():
    world = World(make_job(numNodes=1), make_queue())
    world.job = seen(TorchrunJob, world.job, lambda body: body["spec"].update(launcher="mpirun"))
    world.settle()
    assert (world.phase, world.job.status.reason) == ("Pending", "InvalidSpec")


def test_a_job_that_is_left_alone_is_not_preempted():
    world = running()
    world.job = seen(TorchrunJob, world.job, lambda body: body["spec"].update(launcher="mpirun"))
    assert classify_world(world).workload.is_fixed


def test_a_queue_with_a_status_that_cannot_be_read_is_left_alone():
    world = QueueWorld(make_trq())
    world.settle()
    assert world.queue is not None
    world.queue = seen(
        TorchrunQueue, world.queue, lambda body: body["status"].update(conditions="none")
    )
    plan = world.step()
    assert plan == QueuePlan(events=plan.events)
    assert [event.reason for event in plan.events] == ["Unreadable"]
