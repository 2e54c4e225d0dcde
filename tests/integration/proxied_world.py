"""Users and kubelets for the scenarios of the simulation, on a real API server behind a fault proxy.

A `World` has the interface of a simulation, so `faults.scenarios` run unchanged. Pods are bound to
no node, and their containers need a third of the time.
"""

import asyncio
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
from msgspec import Struct

from bodies import Body
from faults import oracle
from faults.cluster import JOBS, PODS, TORCHRUN_JOBS, TORCHRUN_QUEUES
from faults.faults import Point
from faults.simulation import Scenario, Stuck
from faults.store import Resource
from gates import may_train
from integration.audit import AuditLog, Write, count_creations, without_lease
from integration.controller_process import Api
from integration.fault_proxy import FaultProxy
from integration.proxied_faults import SingleFault
from integration.replicas import Replicas, lasting
from integration.team import Team, pod_status, trains
from soak.verdict import Verdict
from torchrun_api import names
from torchrun_cluster import LocalCluster

BRIEF = lasting("4s", "3s", "500ms")
PACE = 0.3  # of the seconds of a script; long enough to observe a running gang on a busy machine
PATIENCE = 390.0  # seconds for one step: writes refused with 422 are retried after 300
CONVERGENCE = 60.0  # maximum seconds until the expected end state
SERVICES: Resource = ("v1", "services")
LISTED = (TORCHRUN_JOBS, TORCHRUN_QUEUES, JOBS, PODS, SERVICES)
_VARIES = re.compile(
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
    r"|team-[0-9a-f]{8}|(?<=-\d)-[a-z0-9]{5}(?=\W)"
)


class Outcome(Struct, frozen=True):
    """The outcome of a run."""

    wrong: list[str]
    state: dict[str, Any]
    points: list[Point]
    struck: bool
    writes: int


class _Terminated(Struct, frozen=True):
    pid: int

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)


class World:
    """One run, in a namespace of its own."""

    def __init__(self, api: Api, scenario: Scenario) -> None:
        self.team = Team(api)
        self.store = self  # of a simulation
        self.replicas: Replicas
        self._scenario = scenario
        self._began: dict[str, float] = {}
        self._lock = threading.Lock()

    # Actions of users, as in faults.simulation.Simulation

    def submit(self, name: str = "train", **spec: Any) -> None:
        self.team.submit(name, **{"jobQueue": "gpu", "command": "python train.py", **spec})

    def make_queue(self, **spec: Any) -> None:
        self.team.make_queue("gpu", **{"nodeResources": {}, **spec})

    def edit(self, name: str = "train", resource: Resource = TORCHRUN_JOBS, **spec: Any) -> None:
        self.team.api.patch(f"{self.team.group}/{resource[1]}/{name}", {"spec": spec})

    def delete(self, name: str = "train") -> None:
        self.team.api.delete(f"{self.team.group}/torchrunjobs/{name}")

    def queue_status(self) -> Body:
        queue = self.team.api.get(f"{self.team.group}/torchrunqueues/gpu") or {}
        status: Body = queue.get("status", {})
        return status

    async def reaches(self, phase: str, name: str = "train", **status: Any) -> None:
        wanted = {"phase": phase, **status}

        def look() -> bool:
            job_status = (self.team.job(name) or {}).get("status", {})
            return all(job_status.get(each) == value for each, value in wanted.items())

        await self.until(f"{name} {wanted}", look)

    async def trains(self, name: str = "train", nodes: int = 2) -> None:
        def look() -> bool:
            _, pods = self.team.newest_gangs().get(name, (0, []))
            return len(pods) == nodes and all(trains(pod, pods) for pod in pods)

        await self.until(f"{name} trains", look)

    async def until(self, what: str, holds: Callable[[], bool], seconds: float = PATIENCE) -> None:
        deadline = time.monotonic() + seconds
        while not await asyncio.to_thread(holds):
            if time.monotonic() > deadline:
                raise Stuck(what)
            await asyncio.sleep(0.05)

    async def leader(self) -> _Terminated:
        return _Terminated((await asyncio.to_thread(self.replicas.leader)).pid)

    def bodies(self, resource: Resource, namespace: str = "") -> Iterator[Body]:
        version, plural = resource
        root = "/api" if version == "v1" else "/apis"
        yield from self.team.api.items(f"{root}/{version}/namespaces/{self.team.name}/{plural}")

    def everything(self) -> Iterator[tuple[Resource, Body]]:
        for resource in LISTED:
            for body in self.bodies(resource):
                yield resource, body

    # Kubelets

    async def kubelets(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.to_thread(self._look_after_pods)
            await asyncio.sleep(0.05)

    def _look_after_pods(self) -> None:
        pods = list(self.bodies(PODS))
        for pod in pods:
            with suppress(AssertionError):  # it may be deleted
                self._look_after(pod, pods)

    def _look_after(self, pod: Body, pods: list[Body]) -> None:
        meta, phase = pod["metadata"], pod["status"].get("phase")
        if phase == "Pending":
            self.team.pod_becomes(meta["name"], "Running")
        is_worker = meta["labels"].get(names.COMPONENT_LABEL) == names.WORKER
        if phase != "Running" or (is_worker and not may_train(pod, pods)):
            return
        began = self._began.setdefault(meta["uid"], time.monotonic())
        end = self._scenario.script(pod)
        if end is not None and time.monotonic() > began + PACE * end.seconds:
            status = pod_status(
                meta["name"], "Failed" if end.exit_code else "Succeeded", end.message
            )
            self.team.api.patch(f"{self.team.core}/pods/{meta['name']}/status", {"status": status})

    def state(self) -> dict[str, Any]:
        """All objects, without fields that differ between runs."""
        snapshot: dict[str, Any] = {}
        for resource, body in self.everything():
            text = _VARIES.sub("*", json.dumps(body))
            masked = oracle._masked(json.loads(text))
            if resource == PODS:
                masked["status"] = {"phase": masked["status"].get("phase")}
            snapshot[f"{resource[1]}/{masked['metadata']['name']}"] = masked
        return snapshot


def play(
    cluster: LocalCluster,
    api: Api,
    audit: AuditLog,
    folder: Path,
    scenario: Scenario,
    at: Point | None = None,
    kind: str = "",
    wanted: dict[str, Any] | None = None,
) -> Outcome:
    """One run, with or without a fault. Waits until the `wanted` end state, or for a time."""
    folder.mkdir(parents=True)
    start, world = audit.size(), World(api, scenario)
    faults = SingleFault(at, kind, lambda who: _kill(world, who))
    proxy, verdict = FaultProxy(cluster, folder, faults), Verdict(api.client, world.team.name)
    world.replicas = Replicas(cluster, world.team, folder, scenario.replicas, *BRIEF)
    wrong: list[str] = []
    with ExitStack() as stack:
        stack.enter_context(proxy.running())
        for replica in world.replicas.all:
            replica.through(proxy.kubeconfig)
        stack.enter_context(verdict.watching())
        stack.enter_context(world.replicas.running_with_restarts())
        asyncio.run(_scenario(world, scenario, wanted, wrong))
        state = world.state()
        wrong += verdict.wrong
    writes = [w for w in audit.writes(start) if w.resource != "leases" and w.code < 300]
    wrong += _of_writes(audit.writes(start))
    wrong += oracle.differences(wanted, state) if wanted is not None else []
    return Outcome(wrong, state, faults.met, faults.struck, len(writes))


async def _scenario(
    world: World, scenario: Scenario, wanted: dict[str, Any] | None, wrong: list[str]
) -> None:
    kubelets = asyncio.create_task(world.kubelets())
    try:
        await scenario.play(world)  # type: ignore[arg-type]  # it has what scenarios use
        before: list[Any] = [None]

        def rests() -> bool:
            now = world.state()
            same = now == before[0] if wanted is None else not oracle.differences(wanted, now)
            before[0] = now
            if wanted is None:
                time.sleep(2.0)  # the first run: two equal states in a row are the end
            return same

        with suppress(Stuck):  # the differences are reported below below
            await world.until("the wanted end", rests, CONVERGENCE)
    except (Stuck, httpx.HTTPError) as error:
        wrong.append(f"stuck: {error}")
    finally:
        kubelets.cancel()
        with suppress(asyncio.CancelledError):
            await kubelets


def _kill(world: World, who: str) -> None:
    for replica in world.replicas.all:
        identities = [line["identity"] for line in replica.lines() if line["message"] == "serving"]
        if identities[-1:] == [who] or len(world.replicas.all) == 1:
            replica.send(signal.SIGKILL)


def _of_writes(writes: list[Write]) -> list[str]:
    twice = [
        f"{name} was made twice"
        for name, count in count_creations(writes, "jobs").items()
        if count > 1
    ]
    return twice + [f"{w.who} wrote {w.name} without the lease" for w in without_lease(writes)]
