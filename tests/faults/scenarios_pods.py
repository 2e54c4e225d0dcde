"""Scenarios of gangs whose lost pods are replaced alone, and of gangs that end instead."""

import asyncio
from typing import Any

from msgspec import Struct

from bodies import Body
from faults.cluster import PODS, index_of, is_over
from faults.nodes import NODE_COUNT
from faults.scripts import first_gang_stays, stays
from faults.simulation import Scenario, Simulation
from gates import gang_of

REPLACED = 60.0  # seconds, longer than until the Job controller replaces a failed pod
READS_NODES = 100.0  # seconds, also after a fault
REPLACES: dict[str, Any] = {"reliability": {"podReplacement": "Pod"}}


class Place(Struct, frozen=True):
    """The pod of a node of a gang, and where it runs."""

    uid: str
    node: str


async def _start(world: Simulation, nodes: int = 3, **spec: Any) -> dict[str, Place]:
    """Start a gang whose pods are replaced alone. Returns its places.

    A controller that has not read the nodes yet would replace the whole gang.
    """
    world.make_queue()
    await asyncio.sleep(READS_NODES)
    world.submit(numNodes=nodes, **REPLACES, **spec)
    await world.reaches("Running")
    await world.trains(nodes=nodes)
    return _places(world)


def _pod(world: Simulation, node: int) -> Body:
    """The newest pod of a node of the gang."""
    return next(pod for pod in world.workers() if index_of(pod) == str(node))


def _places(world: Simulation) -> dict[str, Place]:
    return {
        index_of(pod): Place(pod["metadata"]["uid"], pod["spec"].get("nodeName", ""))
        for pod in world.workers()
    }


async def _replaced(world: Simulation, before: dict[str, Place], *lost: int) -> None:
    """Wait for the next round. If no new gang has followed, only the lost pods are other ones."""
    await _new_pods(world, before, *lost)
    await world.trains(nodes=len(before))
    places = _places(world)
    moved = {int(index) for index, place in places.items() if place != before[index]}
    is_same_gang = all(gang_of(pod)[2] == "0" for pod in world.workers())
    if is_same_gang and moved != set(lost):
        world.oracle.wrong.append(f"the pods of nodes {moved} are new, and {lost} were lost")


async def _new_pods(world: Simulation, before: dict[str, Place], *lost: int) -> None:
    """Wait for other pods on the places of the lost ones."""

    def exist() -> bool:
        places = _places(world)
        are_new = (places[str(node)].uid != before[str(node)].uid for node in lost)
        return before.keys() == places.keys() and all(are_new)

    await world.until(f"new pods of nodes {lost}", exist)


async def pod_replaced(world: Simulation) -> None:
    """A user deletes the pod of node 1."""
    places = await _start(world)
    world.hands.delete(PODS, _pod(world, 1))
    await _replaced(world, places, 1)
    await world.finish(nodes=3)
    await world.reaches("Succeeded", disruptions=1)


async def leader_replaced(world: Simulation) -> None:
    """The pod of node 0 is evicted between two restarts in place."""
    places = await _start(world, 2)
    world.restart_in_place(1)
    await world.reaches("Running", restarts=1)
    _evict(world, 0)
    await _replaced(world, places, 0)
    await world.reaches("Running", disruptions=1)
    world.restart_in_place(0)
    await world.reaches("Running", restarts=2)
    await world.finish(nodes=2)
    await world.reaches("Succeeded", restarts=2, disruptions=1)


async def pods_replaced(world: Simulation) -> None:
    """Two pods are lost at once, and one of the new pods is lost before the next round."""
    places = await _start(world)
    for node in (1, 2):
        world.hands.delete(PODS, _pod(world, node))
    await _new_pods(world, places, 2)
    await world.until("it has a node", lambda: "nodeName" in _pod(world, 2)["spec"])
    world.hands.delete(PODS, _pod(world, 2))
    await _replaced(world, places, 1, 2)
    await world.finish(nodes=3)
    await world.reaches("Succeeded")


async def no_controller(world: Simulation) -> None:
    """The controller dies with a kubelet's eviction, and again once the new pod exists."""
    places = await _start(world)
    world.nodes.evict(_pod(world, 1))
    (await world.leader()).client.kill()
    await _new_pods(world, places, 1)
    (await world.leader()).client.kill()
    await _replaced(world, places, 1)
    await world.finish(nodes=3)
    await world.reaches("Succeeded", disruptions=1)


async def no_room(world: Simulation) -> None:
    """The new pod finds no node, so a new gang follows."""
    await _start(world, 2)
    _lose_room(world, 4)
    await world.until("a new gang waits", lambda: _waits(world))
    for name in ("node-0", "node-1"):
        world.nodes.cordon(name, closed=False)
    await world.reaches("Succeeded", attempt=1, disruptions=1)


async def less_room(world: Simulation) -> None:
    """The new pod of an elastic job finds no node, so a smaller gang follows."""
    world.nodes.alone = True
    await _start(world, 2, elastic={"minNodes": 1, "maxNodes": 2})
    _lose_room(world, 3)
    await world.reaches("Succeeded", numNodes=1)


def _lose_room(world: Simulation, nodes: int) -> None:
    """Cordon the last nodes, and delete the pod of node 1."""
    for number in range(NODE_COUNT - nodes, NODE_COUNT):
        world.nodes.cordon(f"node-{number}")
    world.hands.delete(PODS, _pod(world, 1))


def _waits(world: Simulation) -> bool:
    """Whether only pods of the second gang are left, and none has a node."""
    pods = [pod for pod in world.store.bodies(PODS) if not is_over(pod)]
    waiting = [pod for pod in pods if gang_of(pod)[2] == "1" and "nodeName" not in pod["spec"]]
    return len(waiting) == len(pods) == 2


async def machine_off(world: Simulation) -> None:
    """The node of a pod is lost and switched off, so a new gang follows."""
    await _start(world, 2)
    world.nodes.lose("node-1")
    await world.reaches("Queued", reason="WaitingForFence")
    world.nodes.switch_off("node-1")
    await world.reaches("Succeeded", attempt=1, disruptions=1)


async def node_deleted(world: Simulation) -> None:
    """A Node object is deleted. Its pod fails, although its ranks go on until the machine is off."""
    await _start(world, 2)
    world.nodes.remove("node-1")
    await world.reaches("Queued", reason="WaitingForFence")
    await asyncio.sleep(REPLACED)
    world.nodes.power_off("node-1")
    world.annotate(machines_off="0/node-1")
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


SCENARIOS = (
    Scenario("pod replaced", pod_replaced, stays, doubtful=True),
    Scenario("leader replaced", leader_replaced, stays, doubtful=True),
    # Losses at the same time have any order, and count once if they are seen together.
    Scenario(
        "pods replaced", pods_replaced, stays, doubtful=True, varies=("attempts", "disruptions")
    ),
    Scenario("no controller", no_controller, stays, replicas=2, doubtful=True),
    Scenario("no room", no_room, first_gang_stays, doubtful=True),
    Scenario("less room", less_room, first_gang_stays, doubtful=True),
    Scenario("machine off", machine_off, first_gang_stays, doubtful=True),
    Scenario("node deleted", node_deleted, first_gang_stays, doubtful=True),
)
