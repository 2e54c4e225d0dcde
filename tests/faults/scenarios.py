"""The reference scenarios: actions of users, and the behaviour of pods.

Pods run longer than a new leader needs to take over, so that faults occur during their work.
"""

import asyncio
from collections.abc import Iterator

from bodies import Body
from faults import scenarios_checkpoints, scenarios_nodes, scenarios_queues, scenarios_workspace
from faults.cluster import PODS, SERVICES, TORCHRUN_JOBS, TORCHRUN_QUEUES
from faults.scripts import first_gang_fails, first_gang_fails_late, first_gang_stays, serves, well
from faults.simulation import NAMESPACE, Scenario, Simulation
from torchrun_api import names

ROUND_SECONDS = 20.0  # twice in the time of the first gang
ZIP = {"workspace": {"source": "zip", "delivery": "shared"}}


async def success(world: Simulation) -> None:
    world.make_queue()
    world.submit()
    await world.reaches("Succeeded")


async def service_taken(world: Simulation) -> None:
    """The name of the Service is taken, so the pods of the new gang wait until it is free."""
    world.make_queue()
    meta = {"name": "train", "namespace": NAMESPACE}
    service = {"apiVersion": "v1", "kind": "Service", "metadata": meta}
    world.hands.create(SERVICES, {**service, "spec": {"selector": {"app": "web"}}})
    world.submit()
    await world.until("its pods run", lambda: _running(world) == 2)
    await world.reaches("Pending", reason="NameConflict")
    world.delete("train", SERVICES)
    await world.reaches("Succeeded")


def _running(world: Simulation) -> int:
    """The number of pods that run."""
    pods = world.store.bodies(PODS, NAMESPACE)
    return sum(pod.get("status", {}).get("phase") == "Running" for pod in pods)


async def restart(world: Simulation) -> None:
    world.make_queue()
    world.submit()
    await world.reaches("Succeeded", attempt=1)


async def large(world: Simulation) -> None:
    """A gang that ends by one request, and before the next one is created."""
    world.make_queue()
    world.submit(numNodes=4)
    await world.reaches("Succeeded", attempt=1)


async def restart_in_place(world: Simulation) -> None:
    """Two failures restart the ranks in the same pods, and the third one ends the gang."""
    world.make_queue()
    world.submit()
    for node in (1, 0):
        await world.trains()
        world.restart_in_place(node)
        await asyncio.sleep(ROUND_SECONDS)
    await world.reaches("Succeeded", attempt=1, restarts=3)


async def suspend(world: Simulation) -> None:
    world.make_queue()
    world.submit()
    await world.reaches("Running")
    world.edit(suspend=True)
    await world.reaches("Suspended")
    await world.until("no pods", lambda: not list(world.store.bodies(PODS, NAMESPACE)))
    world.edit(suspend=False)
    await world.reaches("Succeeded")


async def scale(world: Simulation) -> None:
    world.make_queue()
    world.submit(elastic={"minNodes": 1, "maxNodes": 3})
    await world.reaches("Running")
    world.edit(numNodes=3)
    await world.reaches("Succeeded", numNodes=3)


async def delete(world: Simulation) -> None:
    world.make_queue()
    world.submit()
    await world.trains()
    world.delete()
    await world.until("nothing is left", lambda: not list(_created(world)))


async def queue(world: Simulation) -> None:
    """A queue is missing, is created, and changes while a job runs."""
    world.submit()
    await world.reaches("Pending", reason="QueueNotFound")
    world.make_queue()
    await world.trains()
    world.edit("gpu", TORCHRUN_QUEUES, image="trainer:2")
    await world.until(
        "the edit is seen", lambda: world.queue_status().get("observedGeneration") == 2
    )
    world.submit("later")
    await world.reaches("Succeeded")
    await world.reaches("Succeeded", "later")


async def leader(world: Simulation) -> None:
    """The leader gets SIGTERM while a job runs."""
    world.make_queue()
    world.submit()
    await world.trains()
    (await world.leader()).terminate()
    await world.reaches("Succeeded")


async def workspace(world: Simulation) -> None:
    world.make_queue()
    world.submit(volumes=ZIP)
    await world.reaches("Succeeded")


async def gangs(world: Simulation) -> None:
    """Two jobs with quota for one: the second is admitted after the end of the first."""
    world.make_queue(
        quota={"nodes": 2}, scheduling={"scheduler": "scheduler-plugins", "gang": "coscheduling"}
    )
    world.submit()
    await world.trains()
    world.submit("later")
    await world.reaches("Succeeded", "later")


async def head(world: Simulation) -> None:
    """A separate head, whose end deletes its workers."""
    world.make_queue()
    world.submit(numNodes=3, head={"nodeResources": {"cpus": 1}})
    await world.reaches("Succeeded")
    await world.until("its workers have ended", lambda: not list(_at_work(world)))


def _at_work(world: Simulation) -> Iterator[Body]:
    for pod in world.store.bodies(PODS, NAMESPACE):
        if pod["status"]["phase"] not in ("Succeeded", "Failed"):
            yield pod


def _created(world: Simulation) -> Iterator[Body]:
    """All jobs and their objects."""
    for resource, body in world.store.everything():
        labels = body["metadata"].get("labels", {})
        if resource == TORCHRUN_JOBS or names.MANAGED_BY_LABEL in labels:
            yield body


COSCHEDULING = (("scheduling.x-k8s.io/v1alpha1", "podgroups"),)

SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        *scenarios_checkpoints.SCENARIOS,
        *scenarios_nodes.SCENARIOS,
        *scenarios_queues.SCENARIOS,
        *scenarios_workspace.SCENARIOS,
        Scenario("success", success, well),
        Scenario("service taken", service_taken, well),
        Scenario("restart", restart, first_gang_fails),
        Scenario("large", large, first_gang_fails),
        Scenario("restart in place", restart_in_place, first_gang_fails_late, varies=("attempts",)),
        Scenario("suspend", suspend, first_gang_stays),
        Scenario("scale", scale, first_gang_stays),
        Scenario("delete", delete, well),
        Scenario("queue", queue, well),
        Scenario("leader", leader, well, replicas=2),
        Scenario("workspace", workspace, well),
        Scenario("gangs", gangs, well, installed=COSCHEDULING),
        Scenario("head", head, serves, renumbered=True),
    )
}
SOUND = {name: scenario for name, scenario in SCENARIOS.items() if not scenario.known}
