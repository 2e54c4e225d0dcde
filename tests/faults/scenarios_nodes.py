"""Scenarios of lost nodes, and of too few nodes for an elastic job."""

from faults.scripts import first_gang_stays, stays
from faults.simulation import Scenario, Simulation

# Seconds, longer than the minimum age for growth (5 min) and than an allowed overcharge.
LONG = 330.0
ZIP = {"workspace": {"source": "zip", "delivery": "shared"}}


async def _lose_node(world: Simulation) -> None:
    """A node becomes silent. Its worker may still write, so the next gang waits."""
    world.make_queue()
    world.submit()
    await world.reaches("Running")
    world.nodes.lose("node-1")
    await world.reaches("Queued", reason="WaitingForFence")


async def node_returns(world: Simulation) -> None:
    """The next gang waits until a lost node has returned."""
    await _lose_node(world)
    world.nodes.come_back("node-1")
    await world.reaches("Succeeded")


async def node_off(world: Simulation) -> None:
    """The next gang waits until a lost node is switched off and tainted out-of-service."""
    await _lose_node(world)
    world.nodes.switch_off("node-1")
    await world.reaches("Succeeded")


async def fence(world: Simulation) -> None:
    """With a workspace, launchers fence the worker on a lost node themselves."""
    world.make_queue()
    world.submit(volumes=ZIP)
    await world.reaches("Running")
    world.nodes.lose("node-1")
    await world.reaches("Succeeded")


async def elastic(world: Simulation) -> None:
    """With one node too few, a smaller gang follows, and a larger one after the node has returned."""
    world.nodes.alone = True
    world.nodes.cordon("node-2")
    world.nodes.cordon("node-3")
    world.make_queue(quota={"nodes": 4})
    world.submit(numNodes=3, elastic={"minNodes": 1, "maxNodes": 3})
    await world.reaches("Running", numNodes=2)
    world.nodes.cordon("node-2", closed=False)
    await world.finish(nodes=3)
    await world.reaches("Succeeded")


SCENARIOS = (
    Scenario("node returns", node_returns, first_gang_stays),
    Scenario("node off", node_off, first_gang_stays),
    Scenario("fence", fence, first_gang_stays),
    # A late cache may cause another resize.
    Scenario("elastic", elastic, stays, renumbered=True, varies=("attempts",)),
)
