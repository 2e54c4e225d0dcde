"""Gangs whose lost pods the Job controller replaces one by one."""

from typing import Any

from msgspec.structs import replace

from torchrun_api.core import ContainerState, ContainerStatus, Pod, StateTerminated
from torchrun_api.kinds import JOBS, PODS
from torchrun_api.meta import Condition
from torchrun_api.status import TorchrunJobStatus
from torchrun_controller.reconcile.pods.lifecycle import index_of
from world import DEFAULTS, World, make_job, make_queue

REPORTING = replace(DEFAULTS, progress_url="http://controller:8082")


def submitted(
    nodes: int = 3, queue: dict[str, Any] | None = None, *, parents: bool = False, **spec: Any
) -> World:
    """A job that asks for the replacement of single pods, on a cluster with enough nodes.

    parents: the job `data`, which has succeeded, exists.
    """
    reliability = {"podReplacement": "Pod", **spec.pop("reliability", {})}
    job = make_job(**{"numNodes": nodes, "reliability": reliability, **spec})
    world = World(job, make_queue(**(queue or {})))
    if parents:
        status = TorchrunJobStatus(phase="Succeeded")
        meta = replace(job.metadata, name="data", uid="uid-data")
        world.neighbours = [replace(job, metadata=meta, status=status, spec=make_job().spec)]
    world.defaults = REPORTING
    for index in range(nodes + 2):
        world.node(f"node-{index}")
    world.settle()
    return world


def run(world: World) -> None:
    """Run every pod that waits, each on the node of its index."""
    for pod in world.workers():
        if pod.status.phase == "Pending":
            world.place(pod.metadata.name, f"node-{index_of(pod)}")
            world.pod(pod.metadata.name, phase="Running")
    world.settle_twice()


def running(nodes: int = 3, **spec: Any) -> World:
    world = submitted(nodes, **spec)
    run(world)
    assert world.phase == "Running"
    return world


def delete(world: World, *indexes: int, grace: int = 30) -> None:
    """A user deletes pods, and the controller sees it."""
    workers = world.workers()
    for index in indexes:
        world._ending((PODS.plural, workers[index].metadata.name), grace)
    world.settle()


def stop(world: World, *indexes: int) -> None:
    """Pods are deleted, their containers stop, and the controller sees it."""
    delete(world, *indexes)
    world.containers_stop()
    world.rest()


def evict(world: World, index: int, reason: str = "EvictionByEvictionAPI", **status: Any) -> None:
    """The pod of an index is evicted, and its kubelet reports its end."""
    condition = Condition(type="DisruptionTarget", status="True", reason=reason, message="drained")
    end = StateTerminated(exit_code=143, finished_at=world.now)
    container = ContainerStatus(name="trainer", state=ContainerState(terminated=end))
    changes = {"conditions": (condition,), "container_statuses": (container,), **status}
    world.pod(world.workers()[index].metadata.name, phase="Failed", **changes)


def kill_by_memory(world: World, index: int) -> None:
    """The kernel ends the container of an index, launcher included."""
    name = world.workers()[index].metadata.name
    end = {"exit_code": 137, "reason": "OOMKilled", "finished_at": world.now}
    world.end_container(name, "trainer", **end)


def replace_lost(world: World, seconds: float = 10) -> list[Pod]:
    """Time passes, and the Job controller replaces lost pods. The controller sees the new ones."""
    world.pass_time(seconds=seconds)
    new_names = world.replace_pods()
    world.settle()
    return [world.objects[PODS.plural, name] for name in new_names]


def place(world: World, *indexes: int) -> None:
    """Pods get the nodes of their indexes, and the controller sees it."""
    for index in indexes:
        world.place(world.workers()[index].metadata.name, f"node-{index}")
    world.settle()


def gangs(world: World) -> int:
    """How many gangs there were."""
    return len(world.gangs)


def limit(world: World, name: str = "train") -> int:
    """The backoffLimit of a child Job."""
    limit: int = world.objects[JOBS.plural, name].spec.backoff_limit
    return limit


def counts(world: World) -> tuple[int, int, int]:
    """Attempt, restarts and disruptions."""
    status = world.job.status
    return status.attempt, status.restarts, status.disruptions


def reasons(world: World) -> list[tuple[int, str]]:
    return [(end.number, end.reason) for end in world.job.status.attempts]


def start(world: World, index: int) -> str:
    return world.workers()[index].metadata.annotations.start


def set_creation(world: World, name: str, creation: Any) -> None:
    pod: Pod = world.objects[PODS.plural, name]
    meta = replace(pod.metadata, creation_timestamp=creation)
    world.objects[PODS.plural, name] = replace(pod, metadata=meta)
