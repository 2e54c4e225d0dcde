"""A cluster in virtual time: the coordinator of the controller admits, a model of nodes runs gangs.

Time jumps from event to event. Pods are placed one at a time, as kube-scheduler does it without a
gang scheduler: oldest gang first, each pod on the matching node with the fewest free GPUs
(MostAllocated). A gang makes progress while all of its pods have
a node; an elastic one from its minimum on. It saves a checkpoint every so often. A preempted gang
loses what it did since the last one. A gang that loses a node restarts, and an elastic one goes on
with the pods that are left; neither loses anything, to compare the losses of victims alone.
"""

import heapq
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta

from msgspec import Struct
from msgspec.structs import replace

from torchrun_controller.reconcile.admission.coordinator import admit
from torchrun_controller.reconcile.admission.model import (
    ClusterState,
    Decisions,
    NodeCapacity,
    Queue,
    Workload,
)

GPU = "nvidia.com/gpu"
START = datetime(2026, 1, 1, tzinfo=UTC)
DAY = 86_400.0
STOP_SECONDS = 30.0  # from a preemption to the end of the last pod

Decide = Callable[[ClusterState, datetime], Decisions]


class Job(Struct, frozen=True, kw_only=True):
    """A job of a trace. `seconds` is its length at full size, all times are in seconds.

    `minimum` is the least number of nodes that it makes progress with. `resize` are the times after
    its arrival at which its user asks for another number of nodes. `saves_every` are the seconds
    between its checkpoints, and `reports`: whether it reports them.
    """

    name: str
    queue: str
    nodes: int
    gpus: int
    seconds: float
    arrival: float = 0.0
    deadline: float | None = None
    priority: int = 0
    minimum: int | None = None
    resize: tuple[tuple[float, int], ...] = ()
    selector: dict[str, str] = {}
    saves_every: float = 0.0
    reports: bool = True

    @property
    def size(self) -> int:
        """GPUs at full size."""
        return self.nodes * self.gpus


class Outage(Struct, frozen=True):
    """A node that is gone for a while."""

    node: str
    begin: float
    seconds: float


class Trace(Struct, frozen=True, kw_only=True):
    """Nodes, queues, what is submitted to them, and which nodes fail."""

    name: str
    nodes: tuple[NodeCapacity, ...]
    queues: tuple[Queue, ...]
    jobs: tuple[Job, ...]
    outages: tuple[Outage, ...] = ()

    @property
    def last_arrival(self) -> float:
        """When the load ends; figures are taken up to this time."""
        return max(job.arrival for job in self.jobs)


class Gang:
    """A submitted job: what it asks for, what it was admitted for, and where its pods are."""

    def __init__(self, job: Job, workload: Workload) -> None:
        self.job = job
        self.workload = workload
        self.node_seconds_left = job.seconds * job.nodes  # node seconds
        self.ran = 0.0  # seconds for its deadline
        self.pods_by_node: dict[str, int] = {}
        self.stopping = False
        self.ran_since_start = 0.0  # seconds of the present gang
        self.unsaved = 0.0  # node seconds since its last checkpoint
        self.preempted: list[float] = []  # the time of each preemption
        self.started: float | None = None
        self.version = 0  # of its event "end"

    @property
    def seconds_unsaved(self) -> float:
        """Seconds since the last checkpoint of the present gang, or its start."""
        every = self.job.saves_every
        return self.ran_since_start % every if every else 0.0

    def run(self, pods: int, seconds: float) -> None:
        """Make progress with this many pods, and save."""
        before = self.seconds_unsaved
        self.ran_since_start += seconds
        after = self.seconds_unsaved
        saved = after < before + seconds
        self.unsaved = pods * after if saved else self.unsaved + pods * seconds

    def lose(self) -> float:
        """Lose the progress since the last checkpoint; the GPU seconds that it took."""
        lost, self.unsaved = self.unsaved, 0.0
        self.node_seconds_left += lost
        return lost * self.job.gpus

    @property
    def pods(self) -> int:
        """Pods that make progress now."""
        pods = sum(self.pods_by_node.values())
        least = self.workload.admitted if self.job.minimum is None else self.job.minimum
        return pods if pods and pods >= least and not self.stopping else 0


class Simulation:
    """One run. `watch` is called before time passes, with the seconds until the next event."""

    def __init__(
        self,
        trace: Trace,
        decide: Decide = admit,
        *,
        watch: Callable[["Simulation", float], None] = lambda simulation, seconds: None,
    ) -> None:
        self.trace = trace
        self.time = 0.0
        self.nodes = {node.name: node for node in trace.nodes}
        self.free = {node.name: node.allocatable[GPU] for node in trace.nodes}
        self.queues = {queue.name: queue for queue in trace.queues}
        self.gangs: dict[str, Gang] = {}
        self.waited: dict[str, float] = {}  # seconds from arrival to first progress
        self.ended: dict[str, float] = {}  # the time of each end
        self.preemptions = 0
        self.lost = 0.0  # GPU seconds of preempted gangs
        self._jobs = {job.name: job for job in trace.jobs}
        self._decide = decide
        self._watch = watch
        self._events: list[tuple[float, str, str, int]] = []
        for job in trace.jobs:
            self._push(job.arrival, "arrive", job.name)
            for after, nodes in job.resize:
                self._push(job.arrival + after, "resize", job.name, nodes)
        for outage in trace.outages:
            self._push(outage.begin, "fail", outage.node)
            self._push(outage.begin + outage.seconds, "recover", outage.node)

    def run(self, until: float) -> None:
        """Play the trace up to this time."""
        while self._events and self._events[0][0] <= until:
            self._advance(self._events[0][0])
            while self._events and self._events[0][0] <= self.time:
                _, kind, name, number = heapq.heappop(self._events)
                self._happen(kind, name, number)
            self._settle()
        self._advance(until)

    @property
    def waiting(self) -> Iterable[Gang]:
        """Jobs that are not admitted."""
        return [gang for gang in self.gangs.values() if not gang.workload.admitted]

    @property
    def usable_gpus(self) -> int:
        """GPUs of all nodes that are up."""
        return sum(node.allocatable[GPU] for node in self.nodes.values() if node.usable)

    def _push(self, time: float, kind: str, name: str, number: int = 0) -> None:
        heapq.heappush(self._events, (time, kind, name, number))

    def _advance(self, time: float) -> None:
        seconds = time - self.time
        if seconds:
            self._watch(self, seconds)
        for gang in self.gangs.values():
            if pods := gang.pods:
                gang.node_seconds_left -= pods * seconds
                gang.ran += seconds
                gang.run(pods, seconds)
        self.time = time

    def _happen(self, kind: str, name: str, number: int) -> None:
        if kind == "arrive":
            job = self._jobs[name]
            self.gangs[name] = Gang(job, _workload(job))
        elif kind == "fail":
            self._fail(name)
        elif kind == "recover":
            self.nodes[name] = replace(self.nodes[name], usable=True)
        elif (gang := self.gangs.get(name)) is None:
            return
        elif kind == "resize":
            gang.workload = replace(gang.workload, nodes=number)
            if number < sum(gang.pods_by_node.values()):
                self._release(gang)
        elif kind == "stopped":
            self._release(gang)
            gang.stopping = False
            gang.ran_since_start = 0.0
            gang.workload = replace(gang.workload, admitted=0, preempted_for="", since=None)
        elif kind == "end" and number == gang.version:
            self._release(gang)
            self.ended[name] = self.time
            del self.gangs[name]

    def _fail(self, name: str) -> None:
        self.nodes[name] = replace(self.nodes[name], usable=False)
        for gang in self.gangs.values():
            if name not in gang.pods_by_node:
                continue
            if gang.job.minimum is None:
                self._release(gang)
            else:
                self.free[name] += gang.pods_by_node.pop(name) * gang.job.gpus

    def _release(self, gang: Gang) -> None:
        for name, pods in gang.pods_by_node.items():
            self.free[name] += pods * gang.job.gpus
        gang.pods_by_node = {}

    def _settle(self) -> None:
        """Decide until nothing is left to decide, then place pods and foresee the next ends."""
        again = True
        while again:
            decisions = self._decide(self._state(), START + timedelta(seconds=self.time))
            # A smaller charge leaves quota for others.
            smaller = any(
                one.nodes < self.gangs[one.uid].workload.admitted for one in decisions.grants
            )
            self._carry_out(decisions)
            again = decisions.requeue_after == 0 or smaller
        by_age = sorted(
            (gang for gang in self.gangs.values() if gang.workload.admitted and not gang.stopping),
            key=lambda gang: (gang.workload.since or START, gang.job.name),
        )
        for gang in by_age:
            self._place(gang)
            gang.version += 1
            if pods := gang.pods:
                if gang.started is None:
                    gang.started = self.time
                    self.waited[gang.job.name] = self.time - gang.job.arrival
                end = self.time + max(0.0, gang.node_seconds_left) / pods
                self._push(end, "end", gang.job.name, gang.version)

    def _state(self) -> ClusterState:
        return ClusterState(
            nodes=tuple(self.nodes.values()),
            queues=tuple(self.queues.values()),
            workloads=tuple(self._present(gang) for gang in self.gangs.values()),
        )

    def _present(self, gang: Gang) -> Workload:
        workload, job = gang.workload, gang.job
        seconds_left = None if job.deadline is None else max(0.0, job.deadline - gang.ran)
        pods = sum(gang.pods_by_node.values())
        shrunk = job.minimum is not None and 0 < pods < workload.admitted
        return replace(
            workload,
            seconds_left=seconds_left,
            pods_by_node=dict(gang.pods_by_node),
            running=gang.pods > 0,
            ran_seconds=gang.ran_since_start,
            unsaved_seconds=gang.seconds_unsaved if job.reports else None,
            preemptions=sum(self.time - time < DAY for time in gang.preempted),
            nodes=pods if shrunk and not gang.stopping else workload.nodes,
        )

    def _carry_out(self, decisions: Decisions) -> None:
        for uid, wait in decisions.pending.items():
            gang = self.gangs[uid]
            gang.workload = replace(gang.workload, nominated=wait.nominated)
        for summary in decisions.queues:
            queue = self.queues[summary.name]
            self.queues[summary.name] = replace(queue, round_robin=summary.round_robin)
        for one in decisions.preemptions:
            gang = self.gangs[one.uid]
            gang.workload = replace(gang.workload, preempted_for=one.for_uid)
            lost = gang.lose()
            gang.stopping = True
            gang.preempted.append(self.time)
            self.preemptions += 1
            self.lost += lost
            self._push(self.time + STOP_SECONDS, "stopped", one.uid)
        for granted in decisions.grants:
            gang = self.gangs[granted.uid]
            since = gang.workload.since or START + timedelta(seconds=self.time)
            gang.workload = replace(
                gang.workload,
                nodes=granted.nodes,
                admitted=granted.nodes,
                since=since,
                nominated=False,
            )

    def _place(self, gang: Gang) -> None:
        gpus, selector = gang.job.gpus, gang.job.selector.items()
        for _ in range(gang.workload.admitted - sum(gang.pods_by_node.values())):
            fitting = [
                (self.free[name], name)
                for name, node in self.nodes.items()
                if node.usable and self.free[name] >= gpus and selector <= node.labels.items()
            ]
            if not fitting:
                return
            _, name = min(fitting)
            self.free[name] -= gpus
            gang.pods_by_node[name] = gang.pods_by_node.get(name, 0) + 1


def _workload(job: Job) -> Workload:
    return Workload(
        namespace="team",
        name=job.name,
        uid=job.name,
        queue=job.queue,
        created=START + timedelta(seconds=job.arrival),
        nodes=job.nodes,
        gpus=job.gpus,
        pod={GPU: job.gpus},
        priority=job.priority,
        node_selector=job.selector,
    )
