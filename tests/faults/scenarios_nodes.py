"""Scenarios of lost machines and pods, and of too few nodes for an elastic job."""

import asyncio
from collections.abc import Iterator

from bodies import Body
from faults.cluster import JOBS, PODS, index_of, owners
from faults.nodes import NODE_COUNT
from faults.scripts import first_gang_stays, stays, well
from faults.simulation import NAMESPACE, Scenario, Simulation
from faults.store import Resource

NODES = [f"node-{number}" for number in range(NODE_COUNT)]
ADMITTED = 10.0  # seconds until Kueue has admitted a Job
KUEUE: tuple[Resource, ...] = (("kueue.x-k8s.io/v1beta2", "workloads"),)
ZIP = {"workspace": {"source": "zip", "delivery": "shared"}}


async def _lose_node(world: Simulation) -> None:
    """A node becomes silent. Its worker may still write, so the next gang waits."""
    world.make_queue()
    world.submit()
    await world.reaches("Running")
    world.nodes.lose("node-1")
    await world.reaches("Queued", reason="WaitingForFence")


async def node_returns(world: Simulation) -> None:
    """The next gang waits until a lost machine has returned."""
    await _lose_node(world)
    world.nodes.come_back("node-1")
    await world.reaches("Succeeded")


async def node_off(world: Simulation) -> None:
    """The next gang waits until a lost machine is switched off and tainted out-of-service."""
    await _lose_node(world)
    world.nodes.switch_off("node-1")
    await world.reaches("Succeeded")


async def mass_silence(world: Simulation) -> None:
    """No machine reaches the API server for a while. The gang trains on, and is left alone."""
    world.make_queue()
    world.submit()
    await world.trains()
    for node in NODES:
        world.nodes.lose(node)
    await asyncio.sleep(90.0)
    for node in NODES:
        world.nodes.come_back(node)
        await asyncio.sleep(10.0)
    await world.reaches("Succeeded", attempts=None)


async def evicted(world: Simulation) -> None:
    """The controller dies with a kubelet's eviction, and again once the next gang exists."""
    world.make_queue()
    world.submit()
    await world.trains()
    world.nodes.evict(next(pod for pod in world.workers() if index_of(pod) == "1"))
    (await world.leader()).client.kill()
    await world.until("the next gang exists", lambda: len(list(_jobs(world))) == 2)
    (await world.leader()).client.kill()
    await world.reaches("Succeeded", attempt=1, disruptions=1)


async def machine_leaves(world: Simulation) -> None:
    """A cloud announces that a machine leaves. The gang stops as a whole, and starts elsewhere."""
    world.make_queue()
    world.submit()
    await world.reaches("Running")
    world.nodes.announce_end("node-1")
    await world.reaches("Succeeded", attempt=1, disruptions=1)


async def fence(world: Simulation) -> None:
    """With a workspace, launchers fence the worker on a lost machine themselves."""
    world.make_queue()
    world.submit(volumes=ZIP)
    await world.reaches("Running")
    world.nodes.lose("node-1")
    await world.reaches("Succeeded")


async def suspended(world: Simulation) -> None:
    """Kueue suspends and resumes a gang with a worker on a lost machine, whose Node is deleted."""
    world.make_queue(scheduling={"gang": "kueue"})
    world.submit()
    kueue = asyncio.create_task(_admit(world))
    await world.trains()
    await asyncio.sleep(5.0)
    lost = next(pod["metadata"]["uid"] for pod in world.workers() if index_of(pod) == "1")
    world.nodes.lose("node-1")
    _suspend(world, next(_jobs(world)))
    await asyncio.sleep(2 * ADMITTED)
    world.nodes.remove("node-1")
    await world.until("its pod is removed", lambda: world.nodes.find(PODS, lost) is None)
    await world.reaches("Queued", reason="WaitingForFence")
    world.nodes.power_off("node-1")
    world.annotate(machines_off="0/node-1")
    await world.reaches("Succeeded")
    kueue.cancel()


async def _admit(world: Simulation) -> None:
    """Kueue resumes each suspended Job after a while."""
    while True:
        await asyncio.sleep(ADMITTED)
        for job in list(_jobs(world)):
            if job["spec"].get("suspend"):
                _suspend(world, job, suspended=False)


def _jobs(world: Simulation) -> Iterator[Body]:
    """The child Jobs, without those of strangers."""
    return (job for job in world.store.bodies(JOBS, NAMESPACE) if owners(job))


def _suspend(world: Simulation, job: Body, *, suspended: bool = True) -> None:
    world.hands.patch(JOBS, job, {"spec": {"suspend": suspended}})


async def elastic(world: Simulation) -> None:
    """With one node too few, a smaller gang follows. Resumed, the job has the node that returned."""
    world.nodes.alone = True
    world.nodes.cordon("node-2")
    world.nodes.cordon("node-3")
    world.make_queue(quota={"nodes": 4})
    world.submit(numNodes=3, elastic={"minNodes": 1, "maxNodes": 3})
    await world.reaches("Running", numNodes=2)
    world.nodes.cordon("node-2", closed=False)
    world.edit(suspend=True)
    await world.reaches("Suspended")
    world.edit(suspend=False)
    await world.finish(nodes=3)
    await world.reaches("Succeeded")


SCENARIOS = (
    # The message of the job must say what to do.
    Scenario("node stays lost", _lose_node, first_gang_stays),
    Scenario("node returns", node_returns, first_gang_stays),
    Scenario("node off", node_off, first_gang_stays),
    # The gang may end before a late watch shows that the machines are back.
    Scenario("mass silence", mass_silence, well, varies=("unfenced",)),
    Scenario("evicted", evicted, first_gang_stays, replicas=2),
    Scenario("machine leaves", machine_leaves, first_gang_stays),
    Scenario("fence", fence, first_gang_stays),
    # The attempt ends before its Job resumes, which deletes the Job, or after that. If the watch of
    # Jobs is late, the deletion of the pods is the cause.
    Scenario(
        "suspended",
        suspended,
        first_gang_stays,
        installed=KUEUE,
        renumbered=True,
        varies=("attempts", "lastFailure"),
    ),
    # A late cache may cause another resize.
    Scenario("elastic", elastic, stays, renumbered=True, varies=("attempts",)),
)
