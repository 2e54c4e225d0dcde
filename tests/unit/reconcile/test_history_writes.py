"""The requests after each event in the life of a job, stored beside the tests.

`pytest --update-golden` rewrites them. Read the diff before you commit it.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
from msgspec.structs import replace

from shell_world import GOLDEN, ShellWorld, Shortener, as_documents, compare
from torchrun_api import names
from torchrun_api.kinds.queue import TorchrunQueue
from torchrun_api.kinds.resources import JOBS, SERVICES
from torchrun_controller.controllers.controller import FORBIDDEN_RETRY
from torchrun_controller.controllers.refusals import REJECTED_RETRY
from torchrun_controller.reconcile.gang.gate import REPEAT_SECONDS
from torchrun_controller.reconcile.model.observed import RestartsInPlace
from world import START, ZIP, make_job, make_queue

Step: TypeAlias = tuple[str, Callable[[ShellWorld], object]]

GPUS = {"gpus": 8, "cpus": 4, "memory": "16Gi"}
GIT = {"workspace": {"source": "git", "url": "https://git.example/acme/train.git"}}


def started(queue: TorchrunQueue | None = None, **spec: Any) -> ShellWorld:
    """A job whose gang runs, by default of two nodes, each worker on its own node."""
    world = ShellWorld(make_job(**{"numNodes": 2, **spec}), queue or make_queue())
    for index in range(4):
        world.node(f"node-{index}")
    world.settle()
    if world.phase == "Syncing":
        world.sync_done()
        world.settle()
    run(world)
    assert world.phase == "Running"
    return world


def run(world: ShellWorld, first_node: int = 0) -> None:
    """Run every worker of the latest gang, each on its own node."""
    for index, pod in enumerate(world.workers()):
        world.place(pod.metadata.name, f"node-{first_node + index}")
    world.all_workers("Running")
    world.settle()
    world.pass_time(seconds=REPEAT_SECONDS)
    world.settle()


def elastic() -> ShellWorld:
    """A gang of three nodes, of which two are placed."""
    world = ShellWorld(
        make_job(numNodes=3, elastic={"minNodes": 1, "maxNodes": 4}), make_queue(nodeResources=GPUS)
    )
    world.settle()
    for pod in world.workers()[:2]:
        world.placed(pod.metadata.name)
    world.not_placed("0/2 nodes are available: 2 Insufficient nvidia.com/gpu.", 2)
    world.settle()
    return world


def refused() -> ShellWorld:
    """The API server refuses the Service of a new gang."""
    world = ShellWorld(make_job(numNodes=2), make_queue())
    world.refuse("PATCH", SERVICES, "train", 422, "spec.ports: Invalid value")
    return world


def with_head() -> ShellWorld:
    return started(numNodes=3, head={}, reliability={"maxRestarts": 1})


def fail(world: ShellWorld, index: int = 0) -> None:
    name = world.workers()[index].metadata.name
    world.end_container(name, "trainer", exit_code=1, finished_at=world.now)


def lose_node(world: ShellWorld) -> None:
    world.node("node-1", False)
    world.settle()
    world.pass_time(seconds=40)


def run_elsewhere(world: ShellWorld) -> None:
    world.containers_stop()
    world.settle()
    run(world, first_node=2)


def switch_off(world: ShellWorld) -> None:
    world.node("node-1", False, "node.kubernetes.io/out-of-service")


def report_ranks(world: ShellWorld) -> None:
    """The launchers report that the ranks of the latest gang have started."""
    child = world.observed().gang.current_job.metadata.uid
    world.reports.put_restarts(("ml", "train"), child, RestartsInPlace())


def delete(world: ShellWorld) -> None:
    """A finalizer of somebody else keeps the job."""
    world.job = replace(world.job, metadata=replace(world.job.metadata, deletion_timestamp=START))


def delete_queue(world: ShellWorld) -> None:
    world.queue = None


def accept_service(world: ShellWorld) -> None:
    world.api.refused.clear()
    world.pass_time(seconds=REJECTED_RETRY)


def forbid_deletes(world: ShellWorld) -> None:
    world.refuse("DELETE", JOBS, "train", 403, "a policy forbids it")
    world.spec(suspend=True)


def permit_deletes(world: ShellWorld) -> None:
    world.api.refused.clear()
    world.pass_time(seconds=FORBIDDEN_RETRY)


def pass_minutes(minutes: int) -> Callable[[ShellWorld], None]:
    return lambda world: world.pass_time(minutes=minutes)


def finish_head(world: ShellWorld) -> None:
    world.pod(world.workers()[0].metadata.name, phase="Succeeded")
    world.job_condition("Complete")


def lose_sync_pod(world: ShellWorld) -> None:
    """The first sync pod fails without a message."""
    name = world.observed().workspace.sync_pods[-1].metadata.name
    world.end_container(name, names.SYNC_CONTAINER, exit_code=137, finished_at=world.now)


def syncing() -> ShellWorld:
    """The sync pod of a new job runs."""
    world = ShellWorld(make_job(numNodes=1, volumes=GIT), make_queue())
    world.settle()
    return world


Case: TypeAlias = tuple[Callable[[], ShellWorld], *tuple[Step, ...]]

CASES: dict[str, Case] = {
    "failed-gang": (
        lambda: started(reliability={"maxRestarts": 2}),
        ("a worker fails", fail),
        ("the other containers stop, and the back-off passes", run_elsewhere),
        ("a worker of the second gang fails", fail),
        ("the other containers stop, and the back-off passes", run_elsewhere),
    ),
    "failed-job": (
        lambda: started(reliability={"maxRestarts": 0, "ttlSecondsAfterFinished": 600}),
        ("a worker fails", fail),
        ("the other containers stop", ShellWorld.containers_stop),
        ("the user suspends the job", lambda world: world.spec(suspend=True)),
        ("ten minutes pass", pass_minutes(10)),
    ),
    "succeeded-job": (
        lambda: started(volumes=ZIP, reliability={"ttlSecondsAfterFinished": 600}),
        ("the workers succeed", lambda world: world.all_workers("Succeeded")),
        ("the Job is complete", lambda world: world.job_condition("Complete")),
        ("ten minutes pass", pass_minutes(10)),
    ),
    "deleted-job": (
        started,
        ("the user deletes the job", delete),
        ("a worker fails", fail),
    ),
    "deleted-queue": (
        lambda: started(reliability={"maxRestarts": 2}),
        ("the queue is deleted", delete_queue),
        ("a worker fails", fail),
        ("the queue is created again", lambda world: setattr(world, "queue", make_queue())),
    ),
    "finished-without-queue": (
        lambda: started(make_queue(reliability={"ttlSecondsAfterFinished": 600}), head={}),
        ("the head succeeds", finish_head),
        ("the queue is deleted", delete_queue),
        ("ten minutes pass", pass_minutes(10)),
    ),
    "deleted-child-job": (
        started,
        ("somebody deletes the child Job", ShellWorld.delete_child_job),
    ),
    "suspended": (
        lambda: started(volumes=ZIP),
        ("the user suspends the job", lambda world: world.spec(suspend=True)),
        ("the containers stop", ShellWorld.containers_stop),
        ("the user resumes the job", lambda world: world.spec(suspend=False)),
    ),
    "preempted": (
        started,
        ("the coordinator revokes the admission", ShellWorld.preempt),
        ("the containers stop", ShellWorld.containers_stop),
        ("the job is admitted again", lambda world: world.admit(2)),
    ),
    "deadline": (
        lambda: started(reliability={"activeDeadlineSeconds": 600}),
        ("ten minutes pass", pass_minutes(10)),
        ("the containers stop", ShellWorld.containers_stop),
    ),
    "scaled": (
        lambda: started(elastic={"minNodes": 1, "maxNodes": 4}),
        ("the user scales the job", lambda world: world.spec(num_nodes=3)),
        ("the containers stop", run_elsewhere),
    ),
    "shrunk": (
        elastic,
        ("a worker stays without a node", pass_minutes(10)),
        ("the containers stop", ShellWorld.containers_stop),
    ),
    "lost-machine": (
        started,
        ("the node of a worker is lost", lose_node),
        ("the new gang runs elsewhere", run_elsewhere),
        ("an administrator switches the machine off", switch_off),
    ),
    "fenced-machine": (
        lambda: started(volumes=ZIP),
        ("the node of a worker is lost", lose_node),
        ("the new gang runs elsewhere", run_elsewhere),
        ("its ranks have started", report_ranks),
    ),
    "failed-worker-of-a-head": (
        with_head,
        ("a worker fails", lambda world: fail(world, 1)),
        ("the other containers stop, and the back-off passes", run_elsewhere),
        ("the head succeeds", finish_head),
        ("a minute passes", pass_minutes(1)),
    ),
    "failed-sync": (
        syncing,
        ("the sync pod fails", lose_sync_pod),
        ("the back-off passes", pass_minutes(1)),
        ("the workspace is ready", ShellWorld.sync_done),
    ),
    "refused-object": (
        refused,
        ("the API server refuses the Service", lambda world: None),
        ("the API server accepts it later", accept_service),
    ),
    "refused-delete": (
        started,
        ("the user suspends the job, and the API server refuses the deletion", forbid_deletes),
        ("the API server permits it later", permit_deletes),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_requests_of_a_history(name, pytestconfig):
    make, *steps = CASES[name]
    world, shortener, sent = make(), Shortener(), []
    shortener.shorten(world.api.take())
    for what, act in steps:
        act(world)
        world.rest()
        sent.append((what, shortener.shorten(world.api.take())))
    compare(as_documents(sent), GOLDEN / "histories" / f"{name}.yaml", pytestconfig)
