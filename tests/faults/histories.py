"""Random histories: users, pods and faults in any order, and then a time without faults.

There is no comparison with a run without faults, which would differ. The oracle checks its
invariants at every change. At the end every job must be finished, and a new leader must have
nothing to do.
"""

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias

from msgspec import Struct

import virtual_time
from bodies import Body
from faults.cluster import JOBS, PODS, TORCHRUN_QUEUES
from faults.faults import (
    CLOCKS,
    LASTING,
    NO_REQUEST_FAULT,
    OF_EVENTS,
    OF_REQUESTS,
    FaultPlan,
)
from faults.network import Call, EventFault, RequestFault, Stream
from faults.nodes import NODE_COUNT, End
from faults.scenarios import ZIP
from faults.scripts import serves
from faults.simulation import NAMESPACE, Scenario, Simulation
from faults.store import Change
from faults.surroundings import surroundings
from torchrun_api import names
from torchrun_api.kinds.status import TERMINAL

ACTIONS = (
    "submit",
    "submit",
    "delete",
    "suspend",
    "resume",
    "scale",
    "fail",
    "evict",
    "delete-gang",
    "edit-queue",
    "edit-quota",
    "edit-gpus",
    "lose-node",
    "return-node",
    "kill",
    "terminate",
)
REST = 65.0  # seconds without a write; refused writes of a queue are retried after 60 s
# Each job fits into the quota, but not all of them. "three" waits for the end of "one".
SPECS: dict[str, dict[str, Any]] = {
    "one": {"elastic": {"minNodes": 1, "maxNodes": 3}},
    "two": {"numNodes": 3, "head": {"nodeResources": {"cpus": 1}}},
    "three": {"numNodes": 1, "dependsOn": [{"name": "one", "condition": "Finished"}]},
}
NAMES = tuple(SPECS)
QUOTA = {"gpus": 6, "jobs": 2}
MOST_GPUS = 2  # of each node
KINDS_OF_REQUESTS = (*OF_REQUESTS, *LASTING, *CLOCKS)
Strikes: TypeAlias = dict[int, int]  # kinds of faults by the number of the request or event


class Step(Struct, frozen=True):
    """An action, `after` seconds after the previous step. `which` selects its object."""

    after: float
    action: str
    which: int


class RandomFaults(FaultPlan):
    """Injects faults by the number of the request or event."""

    def __init__(self, strikes: Strikes) -> None:
        super().__init__()
        self._strikes = strikes

    def request(self, call: Call) -> RequestFault:
        usual = super().request(call)
        number = self._strikes.get(len(self.met))
        if number is None:
            return usual
        kind = KINDS_OF_REQUESTS[number % len(KINDS_OF_REQUESTS)]
        if kind in OF_REQUESTS:
            return OF_REQUESTS[kind]()
        if kind in LASTING:
            self.trouble = LASTING[kind]()
        elif not self.skew:  # a clock that jumps back delays waits, by an hour after clock-ahead
            self.skew = CLOCKS[kind]
        return self._troubled(call) or NO_REQUEST_FAULT

    def event(self, stream: Stream, change: Change) -> EventFault:
        usual = super().event(stream, change)
        number = self._strikes.get(len(self.met))
        return usual if number is None else list(OF_EVENTS.values())[number % len(OF_EVENTS)](self)

    def stop(self) -> None:
        """Inject no further faults. A clock that is off stays so."""
        self._strikes = {}


def play(steps: Sequence[Step], strikes: Strikes) -> list[str]:
    """Play one history. Returns all violations."""

    async def run() -> list[str]:
        plan = RandomFaults(strikes)
        history = _History(steps, plan)
        simulation = Simulation(
            Scenario("history", history.play, serves, replicas=2, exact=False), plan
        )
        await simulation.run()
        # Two faults of the lease may lose it, which must end the process. With a clock that is
        # ahead, a machine whose return is not seen is lost at once, and its sync pod is replaced.
        excused = ("NotLeader", *(("more than one sync pod",) if plan.skew > timedelta() else ()))
        wrong = simulation.oracle.wrong
        return [each for each in wrong if not any(excuse in each for excuse in excused)]

    with surroundings():
        return virtual_time.run(run())


class _History:
    def __init__(self, steps: Sequence[Step], plan: RandomFaults) -> None:
        self._steps = steps
        self._plan = plan
        self._lost: set[str] = set()  # nodes

    async def play(self, world: Simulation) -> None:
        world.make_queue(quota=QUOTA, nodeResources={"gpus": MOST_GPUS})
        for step in self._steps:
            await asyncio.sleep(step.after)
            self._act(world, step)
        self._plan.stop()
        world.edit("gpu", TORCHRUN_QUEUES, quota=QUOTA, nodeResources={"gpus": MOST_GPUS})
        for node in sorted(self._lost):
            world.nodes.come_back(node)
        for name in NAMES:
            if world.job(name) is not None:
                world.edit(name, suspend=False)
        if world.job("three") is not None and world.job("one") is None:
            world.edit("three", dependsOn=[])
        for name in NAMES:
            await world.until(f"{name} is over", partial(_over, world, name))
        await world.rest(REST)
        before = world.writes
        (await world.leader()).client.kill()
        await world.leader()
        await world.rest()
        if world.writes != before:
            world.oracle.wrong.append(f"a new leader writes {world.writes - before} times at rest")

    def _act(self, world: Simulation, step: Step) -> None:
        name = NAMES[step.which % len(NAMES)]
        job = world.job(name)
        match step.action:
            case "submit" if job is None:
                spec: Body = {"volumes": ZIP} if step.which % 3 == 0 else {}
                spec |= SPECS[name] | {"priority": step.which}
                world.submit(name, reliability={"maxRestarts": 2}, **spec)
            case "delete" if job is not None:
                world.delete(name)
            case "suspend" | "resume" if job is not None:
                world.edit(name, suspend=step.action == "suspend")
            case "scale" if job is not None and "elastic" in job["spec"]:
                world.edit(name, numNodes=1 + step.which % 3)
            case "edit-queue":
                world.edit("gpu", TORCHRUN_QUEUES, image=f"trainer:{step.which}")
            case "edit-quota":
                world.edit("gpu", TORCHRUN_QUEUES, quota={"gpus": 2 + step.which, "jobs": 2})
            case "edit-gpus":
                gpus = 1 + step.which % MOST_GPUS
                world.edit("gpu", TORCHRUN_QUEUES, nodeResources={"gpus": gpus})
            case "lose-node" | "return-node":
                self._change_node(world, f"node-{step.which % NODE_COUNT}", step.action)
            case "fail" | "evict":
                self._end_worker(world, step)
            case "delete-gang":
                self._delete_gang(world, name)
            case "kill" | "terminate":
                replica = world.replicas[step.which % len(world.replicas)]
                for process in replica.processes[-1:]:
                    process.client.kill() if step.action == "kill" else process.terminate()

    def _change_node(self, world: Simulation, node: str, action: str) -> None:
        if action == "lose-node" and node not in self._lost:
            self._lost.add(node)
            world.nodes.lose(node)
        elif action == "return-node" and node in self._lost:
            self._lost.remove(node)
            world.nodes.come_back(node)

    def _end_worker(self, world: Simulation, step: Step) -> None:
        working = [
            pod
            for pod in world.store.bodies(PODS)
            if pod["metadata"]["labels"].get(names.COMPONENT_LABEL) == names.WORKER
            and pod["status"]["phase"] == "Running"
        ]
        if not working:
            return
        pod = working[step.which % len(working)]
        if step.action == "fail":
            world.nodes.end(pod["metadata"]["uid"], End(0, 1, "boom"))
        else:
            world.hands.delete(PODS, pod)

    def _delete_gang(self, world: Simulation, name: str) -> None:
        """Delete a recorded gang; the number of an unrecorded one would be lost."""
        status = world.status(name)
        child = world.store.get(JOBS, (NAMESPACE, names.child_job(name, status.get("attempt", 0))))
        if child is not None and status.get("workers") is not None:
            world.hands.delete(JOBS, child.body)


def _over(world: Simulation, name: str) -> bool:
    job: Body | None = world.job(name)
    return job is None or job.get("status", {}).get("phase") in TERMINAL
