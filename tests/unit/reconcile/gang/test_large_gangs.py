"""The pods of a failed gang end by one request, and the next gang is created at once."""

import pytest
from msgspec.structs import replace

from queueing import NOW
from torchrun_api import names
from torchrun_api.kinds.core import Pod
from torchrun_api.kinds.resources import PODS
from torchrun_controller.reconcile.gang.cleanup import end_pods
from torchrun_controller.reconcile.model.plan import Delete
from unit.reconcile.failing import fail, running
from world import World, make_job, make_queue


def failed(nodes: int = 3) -> World:
    """A gang with one failed pod. The others run, and the controller has not seen it yet."""
    world = running(nodes=nodes)
    fail(world)
    return world


def start(world: World) -> str:
    """The start annotation in the pod template of the last Job."""
    annotations = world.templates[world.gangs[-1].metadata.uid]["metadata"]["annotations"]
    return str(annotations.get(names.START, ""))


def test_one_request_deletes_the_survivors() -> None:
    world = failed()
    child = world.gangs[-1].metadata
    expected = Delete(
        kind=PODS,
        namespace="ml",
        name=child.name,
        uid=child.uid,
        grace_seconds=5,
        collection=True,
    )
    assert expected in world.step().deletes
    world.settle()
    assert len(world.gangs) == 2
    old_pods = [pod for pod in world.observed().gang.stale_pods if pod.status.phase == "Running"]
    assert [pod.metadata.terminating for pod in old_pods] == [True] * 2


def test_a_pod_that_is_being_deleted_keeps_its_grace_period() -> None:
    world = running(nodes=4)
    drained = world.workers()[1]
    world.drain(drained.metadata.name)
    fail(world)
    deletes = world.step().deletes
    assert [(delete.name, delete.collection) for delete in deletes] == [
        ("train-2-abcde", False),
        ("train-3-abcde", False),
    ]
    world.settle()
    pods = world.observed().gang.stale_pods
    assert {pod.metadata.name: pod.metadata.deletion_grace_period_seconds for pod in pods} == {
        "train-1-abcde": 30,
        "train-2-abcde": 5,
        "train-3-abcde": 5,
    }


def deleted(pod: Pod, grace: int) -> Pod:
    """The pod while it is being deleted, with a grace period in seconds."""
    meta = replace(pod.metadata, deletion_timestamp=NOW, deletion_grace_period_seconds=grace)
    return replace(pod, metadata=meta)


def test_a_deletion_that_was_interrupted_is_repeated() -> None:
    """The API server gives up after a minute, when some of the pods are being deleted."""
    first, *others = running(nodes=4).workers()
    (expected,) = end_pods((first, *others), 5)
    assert expected.collection
    assert end_pods((deleted(first, 5), *others), 5) == (expected,)


def test_a_single_survivor_is_deleted_by_name() -> None:
    (delete,) = failed(nodes=2).step().deletes
    assert (delete.name, delete.collection) == ("train-1-abcde", False)


@pytest.mark.parametrize("nodes", [2, 8, 500])
def test_the_writes_of_a_restart_do_not_grow_with_the_gang(nodes: int) -> None:
    world = failed(nodes)
    first = len(world.plans)
    world.settle()
    world.all_workers("Running")
    world.settle()
    world.containers_stop()
    world.settle_twice()
    assert world.phase == "Running"
    writes = [write for plan in world.plans[first:] for write in (*plan.applies, *plan.deletes)]
    assert len(writes) <= 5


def test_a_gang_that_failed_for_good_ends_by_one_request_too() -> None:
    world = running(nodes=3, maxRestarts=0)
    fail(world)
    plan = world.step()
    assert world.phase == "Failed"
    assert [delete.collection for delete in plan.deletes] == [True]


def test_survivors_of_an_older_gang_end_by_one_request() -> None:
    world = failed()
    world.pass_backoff()
    world.step(writes=len(world.plan().applies))  # and the process dies before the delete
    assert len(world.gangs) == 2
    deletes = world.step().deletes
    assert [(delete.uid, delete.collection) for delete in deletes] == [
        (world.gangs[0].metadata.uid, True)
    ]


def test_a_gang_whose_job_has_failed_needs_no_gate() -> None:
    world = World(make_job(numNodes=2, reliability={"maxRestarts": 5}), make_queue())
    world.settle()
    for _ in range(2):  # the second failure in a row has a back-off
        world.all_workers("Running")
        world.settle()
        fail(world)
        world.rest()
        world.containers_stop()
        world.rest()
    assert len(world.gangs) == 2
    world.job_condition("Failed", "BackoffLimitExceeded")
    world.settle()
    assert (len(world.gangs), start(world)) == (3, "2")
