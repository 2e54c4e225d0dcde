"""Scenarios of gangs whose lost pods are replaced alone, and of gangs that end instead."""

from typing import Any

from msgspec import Struct

from bodies import Body
from faults.cluster import PODS, index_of
from faults.scripts import first_gang_stays, well
from faults.simulation import Scenario, Simulation
from torchrun_api import names

REPLACES: dict[str, Any] = {"reliability": {"podReplacement": "Pod"}}


class Place(Struct, frozen=True):
    """The pod of a node of a gang, and where it runs."""

    uid: str
    node: str


async def _start(world: Simulation, nodes: int = 3, **spec: Any) -> dict[str, Place]:
    """Start a gang whose pods are replaced alone. Returns its places."""
    world.make_queue()
    world.submit(numNodes=nodes, **REPLACES, **spec)
    await world.reaches("Running")
    await world.trains(nodes=nodes)
    return _places(world)


def _pod(world: Simulation, node: int) -> Body:
    """The newest pod of a node of the gang."""
    return next(pod for pod in world.workers() if index_of(pod) == str(node))


def _places(world: Simulation) -> dict[str, Place]:
    return {
        index_of(pod): Place(pod["metadata"]["uid"], pod["spec"]["nodeName"])
        for pod in world.workers()
    }


async def _replaced(world: Simulation, before: dict[str, Place], *lost: int) -> dict[str, Place]:
    """Wait for the next round, and check that only the lost pods are other ones."""
    await world.trains(nodes=len(before))
    after = _places(world)
    moved = {int(index) for index, place in after.items() if place != before[index]}
    if moved != set(lost):
        world.oracle.wrong.append(f"the pods of nodes {moved} are new, lost were {lost}")
    return after


async def pod_replaced(world: Simulation) -> None:
    """A user deletes the pod of node 1."""
    places = await _start(world)
    world.hands.delete(PODS, _pod(world, 1))
    await _replaced(world, places, 1)
    await world.reaches("Succeeded", disruptions=1)
    _stays(world)


async def leader_replaced(world: Simulation) -> None:
    """The pod of node 0 is evicted between two restarts in place."""
    places = await _start(world, 2)
    world.restart_in_place(1)
    await world.reaches("Running", restarts=1)
    _evict(world, 0)
    await _replaced(world, places, 0)
    world.restart_in_place(0)
    await world.reaches("Succeeded", restarts=2, disruptions=1)
    _stays(world)


async def pods_replaced(world: Simulation) -> None:
    """Two pods are lost at once, and one of the new pods is lost before the next round."""
    places = await _start(world)
    for node in (1, 2):
        world.hands.delete(PODS, _pod(world, node))
    await world.until("a new pod waits", lambda: _count(world, 2) == 1)
    world.hands.delete(PODS, _pod(world, 2))
    await _replaced(world, places, 1, 2)
    await world.reaches("Succeeded")
    _stays(world)


async def no_controller(world: Simulation) -> None:
    """The controller dies with a kubelet's eviction, and again once the new pod exists."""
    places = await _start(world)
    world.nodes.evict(_pod(world, 1))
    (await world.leader()).client.kill()
    await world.until("a new pod exists", lambda: _count(world, 1) == 1)
    (await world.leader()).client.kill()
    await _replaced(world, places, 1)
    await world.reaches("Succeeded", disruptions=1)
    _stays(world)


async def no_room(world: Simulation) -> None:
    """The new pod finds no node, so a new gang follows."""
    await _lose_room(world)
    await world.until("a new gang", lambda: world.status().get("attempt") == 1)
    world.nodes.cordon("node-1", closed=False)
    await world.reaches("Succeeded", attempt=1, disruptions=1)


async def less_room(world: Simulation) -> None:
    """The new pod of an elastic job finds no node, so a smaller gang follows."""
    await _lose_room(world, elastic={"minNodes": 1, "maxNodes": 2})
    await world.reaches("Succeeded", numNodes=1, attempt=1)


async def _lose_room(world: Simulation, **spec: Any) -> None:
    world.nodes.alone = True
    await _start(world, 2, **spec)
    for name in ("node-1", "node-2", "node-3"):
        world.nodes.cordon(name)
    world.hands.delete(PODS, _pod(world, 1))


async def machine_off(world: Simulation) -> None:
    """The node of a pod is lost and switched off, so a new gang follows."""
    await _start(world, 2)
    world.nodes.lose("node-1")
    await world.reaches("Queued", reason="WaitingForFence")
    world.nodes.switch_off("node-1")
    await world.reaches("Succeeded", attempt=1, disruptions=1)


def _evict(world: Simulation, node: int) -> None:
    """The eviction API deletes the pod of a node, as a drain does."""
    pod = _pod(world, node)
    condition = {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": "EvictionByEvictionAPI",
        "message": "Eviction API: evicting",
        "lastTransitionTime": world.nodes.time(),
    }
    conditions = [*pod["status"]["conditions"], condition]
    world.hands.patch(PODS, pod, {"status": {"conditions": conditions}}, "status")
    world.hands.delete(PODS, pod)


def _count(world: Simulation, node: int) -> int:
    """How many pods of a node were lost and have a newer one."""
    pods = world.store.bodies(PODS)
    counts = (
        p["metadata"]["annotations"].get(names.FAILURE_COUNT, "0")
        for p in pods
        if index_of(p) == str(node)
    )
    return max(map(int, counts))


def _stays(world: Simulation) -> None:
    """Check that no gang followed the first one."""
    if attempt := world.status().get("attempt", 0):
        world.oracle.wrong.append(f"attempt {attempt} has followed")


SCENARIOS = (
    Scenario("pod replaced", pod_replaced, well),
    Scenario("leader replaced", leader_replaced, well),
    Scenario("pods replaced", pods_replaced, well),
    Scenario("no controller", no_controller, well, replicas=2),
    Scenario("no room", no_room, well),
    Scenario("less room", less_room, well),
    Scenario("machine off", machine_off, first_gang_stays),
)
