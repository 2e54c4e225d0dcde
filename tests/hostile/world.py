"""Hostile objects in the real controller, on a simulated API server without their schemas.

There is no Job controller, so a valid job only gets its Job. Time is virtual.
"""

import asyncio
import copy
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

import virtual_time
from bodies import Body
from faults.api_server import ApiServer
from faults.cluster import JOBS, TORCHRUN_JOBS, TORCHRUN_QUEUES, GarbageCollector, Hands
from faults.faults import FaultPlan
from faults.oracle import EVENTS, LEASES
from faults.replica import Replica
from faults.simulation import NAMESPACE, START
from faults.store import Change
from faults.surroundings import surroundings
from hostile.objects import QUEUE
from torchrun_api.json import JsonObject
from torchrun_api.status import TERMINAL

# Virtual seconds.
REST = 12.0  # without a write
RESTLESS = 900.0  # maximum until no write for that time
GOOD = ("good-before", "good-after")
RESOURCES = {"TorchrunJob": TORCHRUN_JOBS, "TorchrunQueue": TORCHRUN_QUEUES}


def problems(objects: Sequence[JsonObject]) -> list[str]:
    """The violations with these objects beside two valid jobs and a valid queue."""

    async def play() -> list[str]:
        return await World(objects).run()

    with surroundings():
        return virtual_time.run(play())


class World:
    """An API server, one replica of the controller, and users."""

    def __init__(self, objects: Sequence[JsonObject]) -> None:
        self._loop = asyncio.get_running_loop()
        self._objects = objects
        self._server = ApiServer(self._now)
        self._store = self._server.store
        self._hands = Hands(self._server, "a-user")
        self._replica = Replica("a", self._server, FaultPlan(None), self._now)
        self._last_write = 0.0
        GarbageCollector(self._server, self._now, "garbage-collector")
        self._store.subscribe(self._note)

    async def run(self) -> list[str]:
        """Run it. Returns the violations at the end."""
        living = asyncio.create_task(self._replica.run())
        half = len(self._objects) // 2
        self._create("TorchrunQueue", QUEUE, {"image": "trainer:1"})
        for body in self._objects[:half]:
            self._add(body)
        await asyncio.sleep(5)
        self._create("TorchrunJob", GOOD[0], {})
        for body in self._objects[half:]:
            self._add(body)
        self._create("TorchrunJob", GOOD[1], {})
        wrong = await self._rest()
        wrong += self._of_process() + self._of_neighbours()
        wrong += [problem for body in self._objects for problem in self._of_object(body)]
        living.cancel()
        await asyncio.gather(living, return_exceptions=True)
        return wrong

    def _now(self) -> datetime:
        return START + timedelta(seconds=self._loop.time())

    def _note(self, change: Change) -> None:
        if change.resource not in (LEASES, EVENTS):
            self._last_write = self._loop.time()

    def _create(self, kind: str, name: str, spec: Body) -> None:
        if kind == "TorchrunJob":
            spec = {"jobQueue": QUEUE, "command": "python train.py", "numNodes": 2, **spec}
        self._add({"kind": kind, "metadata": {"name": name}, "spec": spec})

    def _add(self, body: JsonObject) -> None:
        kind, meta = str(body["kind"]), body["metadata"]
        assert isinstance(meta, dict)
        whole: Body = copy.deepcopy({**body, "apiVersion": "torchrun.ai/v1alpha1"})
        whole["metadata"]["namespace"] = NAMESPACE
        self._hands.create(RESOURCES[kind], whole)

    async def _rest(self) -> list[str]:
        deadline = self._loop.time() + RESTLESS
        while left := self._unfinished():
            if self._loop.time() > deadline:
                return [f"no rest: {left}"]
            await asyncio.sleep(1.0)
        return []

    def _unfinished(self) -> str:
        if self._loop.time() - self._last_write < REST:
            last = [change.name for change in self._store.changes[-5:]]
            return f"writes go on: {last}"
        process = self._replica.process
        if not process.leads:
            return "nobody leads"
        for name, queue in process.components.queues.items():
            waiting = [*queue._dirty, *queue._processing, *queue._limiter._failures]
            if waiting:
                return f"keys of {name}: {waiting[:5]}"
        return ""

    def _of_process(self) -> list[str]:
        wrong = []
        for process in self._replica.processes:
            if process.exit is not None:
                wrong.append(f"the process ended: {process.exit!r}")
            if bugs := process.metrics.reconcile_panics._value.get():
                wrong.append(f"the process met {bugs:.0f} bugs")
        return wrong

    def _of_neighbours(self) -> list[str]:
        there = {name: self._store.get(JOBS, (NAMESPACE, name)) for name in GOOD}
        return [f"{name} has no Job" for name, job in there.items() if job is None]

    def _of_object(self, body: JsonObject) -> list[str]:
        """Every object that exists has a status; finished ones may be gone."""
        meta = body["metadata"]
        assert isinstance(meta, dict)
        key = (NAMESPACE, str(meta["name"]))
        stored = self._store.get(RESOURCES[str(body["kind"])], key)
        status = body.get("status")
        over = isinstance(status, dict) and status.get("phase") in list(
            TERMINAL
        )  # so the object was created
        return (
            [] if stored is None or over else [f"{key[1]}: {each}" for each in unsaid(stored.body)]
        )


def unsaid(body: Body) -> list[str]:
    """The missing parts in the status of an object that the controller has seen."""
    status: Any = body.get("status")
    if not isinstance(status, dict):
        return [f"no status but {status!r}"]
    if body["kind"] == "TorchrunJob" and not status.get("phase"):
        return ["no phase"]
    conditions = status.get("conditions")
    reasons = [c for c in conditions if c.get("reason")] if isinstance(conditions, list) else []
    if not reasons:
        return [f"no condition that gives a reason: {conditions!r}"]
    if body["kind"] == "TorchrunJob" and not (status.get("reason") and status.get("message")):
        return [f"no reason or message: {status}"]
    return []
