"""Scenarios of queues: admission, dependencies, other schedulers, and the deletion of a queue."""

import asyncio
from collections.abc import Iterator
from functools import partial

from bodies import Body
from faults.cluster import PODS, TORCHRUN_QUEUES, is_worker
from faults.nodes import End
from faults.oracle import KAI_QUEUES
from faults.scripts import (
    TRAINING,
    first_gang_fails,
    first_gang_stays,
    first_gangs_of,
    two_gangs_fail,
    well,
)
from faults.simulation import NAMESPACE, Scenario, Simulation
from faults.store import Resource
from torchrun_api import names

KAI: tuple[Resource, ...] = (KAI_QUEUES, ("scheduling.run.ai/v2alpha2", "podgroups"))
GPUS = {"gpus": 2}  # of each node
VOLCANO: tuple[Resource, ...] = (("scheduling.volcano.sh/v1beta1", "podgroups"),)


async def preemption(world: Simulation) -> None:
    """A job of higher priority preempts another, which continues afterwards."""
    world.make_queue(quota={"gpus": 4}, nodeResources=GPUS)
    world.submit("batch", priority=1)
    await world.reaches("Running", "batch")
    world.submit("urgent", priority=10)
    await world.reaches("Preempted", "batch")
    await world.reaches("Succeeded", "urgent")
    await world.reaches("Succeeded", "batch")


async def reclaim(world: Simulation) -> None:
    """A queue reclaims quota that another queue of its cohort has borrowed."""
    world.make_queue("gpu", quota={"gpus": 4}, cohort="all", nodeResources=GPUS)
    world.make_queue("guest", quota={"gpus": 0}, cohort="all", nodeResources=GPUS)
    world.submit("batch", jobQueue="guest")
    await world.reaches("Running", "batch")
    world.submit("owner")
    await world.reaches("Preempted", "batch")
    await world.reaches("Succeeded", "owner")
    await world.reaches("Succeeded", "batch")


async def deletion_under_quota(world: Simulation) -> None:
    """A running job is deleted while another waits for its end."""
    world.make_queue(quota={"jobs": 1})
    world.submit("batch")
    await world.reaches("Running", "batch")
    world.submit("later")
    await world.reaches("Queued", "later")
    world.delete("batch")
    await world.reaches("Succeeded", "later")


async def requests_edited(world: Simulation) -> None:
    """The queue gives more GPUs to each node, so the next gang of a job waits for another job."""
    world.make_queue(quota={"gpus": 4}, nodeResources=GPUS)
    world.submit("edited", numNodes=1)
    world.submit("other", numNodes=1)
    await world.reaches("Running", "edited")
    await world.trains("other", nodes=1)
    world.edit("gpu", TORCHRUN_QUEUES, nodeResources={"gpus": 4})
    await world.until(
        "the edit is seen", lambda: world.queue_status().get("observedGeneration") == 2
    )
    (pod,) = world.workers("edited")
    world.nodes.end(pod["metadata"]["uid"], End(0, 1, "no such file"))
    await world.until(
        "the admission is returned", lambda: not world.status("edited").get("admission")
    )
    await world.reaches("Queued", "edited", reason="WaitingForAdmission")
    await world.finish("other", nodes=1)
    await world.reaches("Succeeded", "other")
    await world.reaches("Succeeded", "edited")


async def depends(world: Simulation) -> None:
    """A job depends on two others; one is deleted before the other ends."""
    world.make_queue()
    world.submit("early", numNodes=1, reliability={"ttlSecondsAfterFinished": 20})
    world.submit("late", numNodes=1)
    world.submit("both", numNodes=1, dependsOn=[{"name": "early"}, {"name": "late"}])
    await world.until("early is removed", lambda: world.job("early") is None)
    await world.reaches("Succeeded", "both")


def late_takes_long(pod: Body) -> End | None:
    job = pod["metadata"]["labels"][names.JOB_LABEL]
    return (
        End(TRAINING / 2) if job == "early" else End(3 * TRAINING) if job == "late" else well(pod)
    )


async def ttl(world: Simulation) -> None:
    world.make_queue()
    world.submit(reliability={"ttlSecondsAfterFinished": 30})
    await world.reaches("Succeeded")
    await world.until("the job is removed", lambda: world.job() is None)
    await world.until("nothing is left", lambda: not list(_workers(world)))


async def deadline(world: Simulation) -> None:
    world.make_queue()
    world.submit(reliability={"activeDeadlineSeconds": 30})
    await world.reaches("TimedOut")
    await world.until("no worker is left", lambda: not list(_workers(world)))


async def suspend_backing_off(world: Simulation) -> None:
    """A suspension between a failure and the next gang keeps the failure count."""
    world.make_queue()
    world.submit()
    await world.until("two gangs failed", lambda: world.status().get("restarts") == 2)
    world.edit(suspend=True)
    await world.reaches("Suspended")
    world.edit(suspend=False)
    await world.reaches("Succeeded")


async def edited(world: Simulation) -> None:
    """Limits and quota of a queue change while a job runs."""
    world.make_queue(quota={"nodes": 4})
    world.submit()
    await world.trains()
    world.edit("gpu", TORCHRUN_QUEUES, quota={"nodes": 2}, limits={"maxNodesPerJob": 2})
    await world.until(
        "the edit is seen", lambda: world.queue_status().get("observedGeneration") == 2
    )
    world.submit("later")
    await world.reaches("Queued", "later")
    await world.finish()
    await world.reaches("Succeeded")
    await world.reaches("Succeeded", "later")


async def queue_deleted(world: Simulation) -> None:
    """A queue is deleted after its running job has ended; another job waits until it is recreated."""
    world.make_queue(quota={"nodes": 2})
    world.submit()
    await world.trains()
    world.submit("later")
    await world.reaches("Queued", "later")
    world.delete("gpu", TORCHRUN_QUEUES)
    await world.until("the deletion is seen", lambda: world.status("later")["phase"] == "Pending")
    await world.finish()
    await world.reaches("Succeeded")
    await world.until("the queue is gone", lambda: not world.store.get(*_GPU))
    await world.reaches("Pending", "later", reason="QueueNotFound")
    world.make_queue()
    await world.reaches("Succeeded", "later")


_GPU = TORCHRUN_QUEUES, (NAMESPACE, "gpu")


async def volcano(world: Simulation) -> None:
    world.make_queue(scheduling={"scheduler": "volcano"})
    world.submit()
    await world.reaches("Succeeded", attempt=1)


async def kai_queue(world: Simulation) -> None:
    """A KAI queue is created, corrected, and deleted with its queue."""
    meta = {"name": "default"}
    parent = {"apiVersion": KAI_QUEUES[0], "kind": "Queue", "metadata": meta, "spec": {}}
    world.hands.create(KAI_QUEUES, parent)
    world.make_queue(
        kaiQueue="team-gpu", quota={"gpus": 8}, scheduling={"scheduler": "kai-scheduler"}
    )
    world.submit()
    await world.trains()
    await world.until("the KAI queue is there", lambda: world.store.get(*_KAI) is not None)
    world.edit("gpu", TORCHRUN_QUEUES, quota={"gpus": 16})
    await world.reaches("Succeeded")
    world.delete("gpu", TORCHRUN_QUEUES)
    await world.until("the KAI queue is gone", lambda: world.store.get(*_KAI) is None)
    await world.until("the queue is gone", lambda: world.store.get(*_GPU) is None)


_KAI = KAI_QUEUES, ("", "team-gpu")


async def waiting(world: Simulation) -> None:
    """Jobs that wait for an action of the user. Each message must name it."""
    world.make_queue(quota={"nodes": 2})
    world.submit("lost", jobQueue="missing")
    world.submit("large", numNodes=3)
    world.submit("orphan", dependsOn=[{"name": "nobody"}])
    world.submit("circle", dependsOn=[{"name": "circle"}])
    world.submit("code", volumes={"workspace": {"source": "git", "url": "https://git.example/a"}})
    world.submit("unplaced", numNodes=1)
    for number in range(4):
        world.nodes.cordon(f"node-{number}")
    for name in ("lost", "large", "orphan", "circle", "code", "unplaced"):
        await world.until(f"{name} says why", partial(_has_status, world, name))
    await asyncio.sleep(60.0)


def _has_status(world: Simulation, name: str) -> bool:
    return bool(world.status(name))


def _workers(world: Simulation) -> Iterator[Body]:
    return (pod for pod in world.store.bodies(PODS, NAMESPACE) if is_worker(pod))


SCENARIOS = (
    Scenario("preemption", preemption, first_gangs_of("batch")),
    Scenario("reclaim", reclaim, first_gangs_of("batch")),
    Scenario("deletion under quota", deletion_under_quota, first_gangs_of("batch")),
    Scenario("requests edited", requests_edited, first_gangs_of("edited", "other")),
    Scenario("depends", depends, late_takes_long),
    Scenario("ttl", ttl, well),
    # Pods are deleted before the status, so that a deadline holds even if the status is refused. A
    # crash in between leaves a gang that seems to have failed.
    Scenario(
        "deadline",
        deadline,
        first_gang_stays,
        varies=("workers", "workersStatus", "lastFailure", "Scheduled"),
    ),
    # The suspension may come after the third gang exists; then a fourth one follows.
    Scenario(
        "suspend backing off",
        suspend_backing_off,
        two_gangs_fail,
        renumbered=True,
        varies=("attempts",),
    ),
    # Only the status has the queue policy of a job. If it is lost or late, the current queue
    # applies.
    Scenario("queue edited", edited, first_gangs_of("train"), varies=("queuePolicy",)),
    Scenario("queue deleted", queue_deleted, first_gangs_of("train")),
    Scenario("waiting", waiting, well),
    Scenario("volcano", volcano, first_gang_fails, installed=VOLCANO),
    Scenario("kai queue", kai_queue, well, installed=KAI),
)
