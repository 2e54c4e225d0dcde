"""One run: a scenario with real controllers on a simulated cluster, in virtual time."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Any

from msgspec import Struct

import virtual_time
from bodies import Body
from faults import oracle
from faults.api_server import ApiServer
from faults.checkpoints import Checkpoints
from faults.cluster import (
    JOBS,
    PODS,
    TORCHRUN_JOBS,
    TORCHRUN_QUEUES,
    GarbageCollector,
    Hands,
    PodCollector,
)
from faults.faults import FaultPlan, Planned, Point
from faults.job_controller import JobController
from faults.launchers import Launchers
from faults.nodes import End, Nodes, Script
from faults.oracle import EVENTS, LEASES, Oracle
from faults.replica import Process, Replica
from faults.store import Change, Resource
from faults.surroundings import surroundings
from gates import gang_of, may_train
from torchrun_api import names

START = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
NAMESPACE = "team"
# Virtual seconds.
PATIENCE = 1200.0  # timeout of one step of a scenario
REST = 12.0  # without a write; longer than any pause of the controller between two steps
RESTLESS = 900.0  # maximum until rest
CONVERGENCE = 400.0  # maximum until the expected end state


class Stuck(Exception):  # noqa: N818 named for the state
    """A step of a scenario timed out."""


class Scenario(Struct, frozen=True):
    """The actions of users, and the behaviour of their pods. `installed`: kinds of gang schedulers.

    `renumbered`: a fault may cause another replacement of a gang, so the last one has another
    number.
    """

    name: str
    play: Callable[["Simulation"], Awaitable[None]]
    script: Script
    replicas: int = 1
    saves: bool = False  # whether the ranks save checkpoints
    installed: tuple[Resource, ...] = ()
    renumbered: bool = False
    varies: tuple[
        str, ...
    ] = ()  # fields of spec or status, and conditions, that a fault may change
    known: str = ""  # the bug that fails this scenario even without faults
    exact: bool = True  # every failure of a worker must be counted


class Outcome(Struct, frozen=True):
    """The outcome of a run. `sent`: write requests; `writes`: those that changed something.

    Without the lease and events.
    """

    wrong: list[str]
    state: dict[str, Any]
    points: list[Point]
    struck: list[str]
    sent: int
    writes: int
    seconds: float


class Simulation:
    """A cluster, the users of a namespace, and the replicas of the controller."""

    def __init__(
        self,
        scenario: Scenario,
        plan: FaultPlan,
        wanted: dict[str, Any] | None = None,
        trace: Callable[[str], None] | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.server = ApiServer(self.now, scenario.installed)
        self.store = self.server.store
        self.oracle = Oracle(self.store, self._is_ours, self.now)
        self.hands = Hands(self.server, "a-user")
        self.plan = plan
        self.replicas = [
            Replica(name, self.server, plan, self.now)
            for name in ("a", "b", "c")[: scenario.replicas]
        ]
        GarbageCollector(self.server, self.now, "garbage-collector")
        JobController(self.server, self.now)
        PodCollector(self.server, self.now, "pod-garbage-collector")
        self.nodes = Nodes(self.server, self.now, scenario.script)
        self.launchers = Launchers(self.store, self.now, self._leader)
        if scenario.saves:
            Checkpoints(self.nodes, self.oracle.saves, self.now, self._leader)
        self.oracle.unseen = lambda: self.nodes.unseen
        self._scenario = scenario
        self._wanted = wanted
        self._changed = asyncio.Event()
        self._last_write = 0.0
        self.writes = 0
        self._trace = trace
        self.store.subscribe(self._note)
        self._make_strangers()

    def now(self) -> datetime:
        """The simulated time of day."""
        return START + timedelta(seconds=self._loop.time())

    def _make_strangers(self) -> None:
        """Create objects of other owners with the label of our jobs."""
        labels = {names.JOB_LABEL: "train", names.ATTEMPT_LABEL: "0"}
        meta = {"name": "stranger", "namespace": NAMESPACE, "labels": labels}
        container = {"name": "main", "image": "theirs:1"}
        template = {"metadata": {"labels": {}}, "spec": {"containers": [container]}}
        spec = {"completions": 1, "parallelism": 1, "suspend": True, "template": template}
        for resource, kind in ((JOBS, "Job"), (("v1", "services"), "Service")):
            body = {"apiVersion": resource[0], "kind": kind, "metadata": meta, "spec": spec}
            self.hands.create(resource, body)

    async def run(self) -> None:
        """Play the scenario and wait for rest. The oracle records violations."""
        tasks = [asyncio.create_task(self._start(at)) for at in range(len(self.replicas))]
        try:
            await self._scenario.play(self)
            await self.rest()
            self.oracle.ledger.close(exact=self._scenario.exact)
        except Stuck as error:
            self.oracle.wrong.append(f"stuck: {error}")
        finally:
            self._check_processes()
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception):
                self.oracle.wrong.append(f"a replica broke: {end!r}")

    async def _start(self, number: int) -> None:
        """Start the replicas. The first one gets the lease."""
        await asyncio.sleep(0.1 * number)
        await self.replicas[number].run()

    # Actions of users

    def submit(self, name: str = "train", **spec: Any) -> None:
        """Create a TorchrunJob."""
        annotations = spec.pop("annotations_", {})
        spec_ = {"jobQueue": "gpu", "command": "python train.py", "numNodes": 2, **spec}
        self._create(TORCHRUN_JOBS, "TorchrunJob", name, spec_, annotations)

    def make_queue(self, name: str = "gpu", **spec: Any) -> None:
        """Create a TorchrunQueue."""
        self._create(TORCHRUN_QUEUES, "TorchrunQueue", name, {"image": "trainer:1", **spec})

    def _create(
        self,
        resource: Resource,
        kind: str,
        name: str,
        spec: Body,
        annotations: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        meta: Body = {"name": name, "namespace": NAMESPACE}
        if annotations:
            meta["annotations"] = dict(annotations)
        body = {"apiVersion": resource[0], "kind": kind, "metadata": meta, "spec": spec}
        self.hands.create(resource, body)

    def edit(self, name: str = "train", resource: Resource = TORCHRUN_JOBS, **spec: Any) -> None:
        """Change the spec of a job or another object."""
        known = self.store.get(resource, (NAMESPACE, name))
        assert known is not None
        self.hands.patch(resource, known.body, {"spec": spec})

    def annotate(self, name: str = "train", **values: str) -> None:
        """Set our annotations of a job, as the plugin does."""
        known = self.job(name)
        assert known is not None
        annotations = {
            f"{names.GROUP}/{key.replace('_', '-')}": each for key, each in values.items()
        }
        self.hands.patch(TORCHRUN_JOBS, known, {"metadata": {"annotations": annotations}})

    def delete(self, name: str = "train", resource: Resource = TORCHRUN_JOBS) -> None:
        """Delete a TorchrunJob or another object."""
        known = self.store.get(resource, (NAMESPACE, name))
        assert known is not None
        self.hands.delete(resource, known.body)

    def job(self, name: str = "train") -> Body | None:
        """The TorchrunJob."""
        known = self.store.get(TORCHRUN_JOBS, (NAMESPACE, name))
        return known.body if known else None

    def status(self, name: str = "train") -> Body:
        """The status of the TorchrunJob; empty without one."""
        status: Body = (self.job(name) or {}).get("status", {})
        return status

    def queue_status(self) -> Body:
        """The status of the TorchrunQueue."""
        known = self.store.get(TORCHRUN_QUEUES, (NAMESPACE, "gpu"))
        status: Body = known.body.get("status", {}) if known else {}
        return status

    async def reaches(self, phase: str, name: str = "train", **status: Any) -> None:
        """Wait for a phase and other fields of the status. Raises Stuck."""
        expected = {"phase": phase, **status}

        def there() -> bool:
            status = self.status(name)
            return all(status.get(field) == value for field, value in expected.items())

        await self.until(f"{name} {expected}", there)

    async def trains(self, name: str = "train", nodes: int = 2) -> None:
        """Wait until all pods of a gang run, independent of the status."""
        await self.until(f"{name} trains", lambda: len(self._workers(name)) == nodes)

    async def finish(self, name: str = "train", nodes: int = 2) -> None:
        """Wait until all pods of a gang run, and let them succeed."""
        await self.trains(name, nodes)
        for pod in self._workers(name):
            self.nodes.end(pod["metadata"]["uid"], End(0))

    def restart_in_place(self, node: int, name: str = "train") -> None:
        """A rank of a gang that runs fails, and its launchers start all ranks again."""
        workers = self._workers(name)
        assert workers, f"{name} does not run"
        self.oracle.ledger.note_failed_round(name)
        self.launchers.restart_in_place(workers, node)

    def _workers(self, name: str) -> list[Body]:
        """The pods of its gang, if all run, have their start annotation, and find each other."""
        pods = self.workers(name)
        started = (
            pod["status"]["phase"] == "Running"
            and may_train(pod, pods)
            and self.nodes.finds_leader(pod)
            for pod in pods
        )
        return pods if all(started) else []

    def workers(self, name: str = "train") -> list[Body]:
        """The pods of the latest gang of a job."""
        labels = {names.JOB_LABEL: name, names.COMPONENT_LABEL: names.WORKER}
        pods = [
            pod
            for pod in self.store.bodies(PODS, NAMESPACE)
            if labels.items() <= pod["metadata"].get("labels", {}).items()
        ]
        latest = max((int(gang_of(pod)[2]) for pod in pods), default=0)
        return [pod for pod in pods if gang_of(pod)[2] == str(latest)]

    async def until(self, what: str, holds: Callable[[], bool]) -> None:
        """Wait until a condition holds. Raises Stuck."""
        try:
            async with asyncio.timeout(PATIENCE):
                while not holds():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise Stuck(f"{what}; {self.status()}") from None

    async def leader(self) -> Process:
        """Wait for a leader, and return its process."""
        while (found := self._leader()) is None:  # noqa: ASYNC110 no change tells of it
            await asyncio.sleep(0.1)
        return found

    def _leader(self) -> Process | None:
        living = (replica.process for replica in self.replicas if replica.processes)
        return next((process for process in living if process.leads), None)

    # The end

    async def rest(self, idle: float = REST) -> None:
        """Wait until there are no writes for a time and the leader is idle. Raises Stuck."""
        deadline = self._loop.time() + RESTLESS
        self._late = self._loop.time() + CONVERGENCE
        while left := self._unfinished(idle):
            if self._loop.time() > deadline:
                raise Stuck(f"no rest: {left}")
            await asyncio.sleep(1.0)

    def _unfinished(self, idle: float) -> str:
        """The reason why the cluster is not at rest; "" at rest."""
        if self._loop.time() - self._last_write < idle:
            return "writes go on"
        leader = self._leader()
        if leader is None:
            return "nobody leads"
        for name, queue in leader.components.queues.items():
            if len(queue) or queue._processing or queue._limiter._failures:
                return f"the keys of {name}: {queue._dirty} {queue._processing}"
        if self._wanted is not None and self._loop.time() < self._late:
            found = oracle.differences(self._wanted, self._end_state())
            self._last_write = self._loop.time()
            return found[0] if found else ""
        return ""

    def _end_state(self) -> dict[str, Any]:
        scenario = self._scenario
        return oracle.end_state(self.store, renumbered=scenario.renumbered, varies=scenario.varies)

    def _check_processes(self) -> None:
        """Check that no process has ended by itself or logged a bug."""
        for process in (p for replica in self.replicas for p in replica.processes):
            if process.exit is not None:
                self.oracle.wrong.append(f"process {process.client.name} ended: {process.exit!r}")
            if bugs := process.metrics.reconcile_panics._value.get():
                self.oracle.wrong.append(f"process {process.client.name} met {bugs} bugs")

    def _is_ours(self, writer: str) -> bool:
        return any(writer == p.client.name for r in self.replicas for p in r.processes)

    def _note(self, change: Change) -> None:
        self._changed.set()
        if change.resource not in (LEASES, EVENTS):
            self._last_write = self._loop.time()
            self.writes += self._is_ours(change.writer)
            if self._trace is not None:
                self._trace(self._line(change))

    def _line(self, change: Change) -> str:
        status = change.body.get("status", {})
        parts = [str(status[field]) for field in ("phase", "reason", "message") if field in status]
        what = f"{change.writer} {change.verb} {change.name}"
        return f"{self._loop.time():8.3f} s  {what}  {': '.join(parts)}"

    def outcome(self) -> Outcome:
        """The outcome of the run."""
        sent = [point for point in self.plan.met if is_write(point)]
        return Outcome(
            wrong=self.oracle.wrong,
            state=self._end_state(),
            points=self.plan.met,
            struck=self.plan.struck,
            sent=len(sent),
            writes=self.writes,
            seconds=self._loop.time(),
        )


def is_write(point: Point) -> bool:
    """Whether a request is a write, without the lease and events."""
    session, verb, about = point.what.split(" ", 2)
    return session == "write" and verb != "GET" and not about.startswith("events")


def simulate(
    scenario: Scenario,
    planned: Planned | None = None,
    wanted: dict[str, Any] | None = None,
    trace: Callable[[str], None] | None = None,
) -> Outcome:
    """One run in virtual time, until the `wanted` end state or a timeout.

    `trace` is called with a line for every change.
    """

    async def play() -> Outcome:
        simulation = Simulation(scenario, FaultPlan(planned), wanted, trace)
        await simulation.run()
        return simulation.outcome()

    with surroundings():
        return virtual_time.run(play())
