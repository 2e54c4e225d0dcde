"""A cluster in simulated time, run by the decisions of the coordinator."""

import heapq
import random
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from queueing import NOW, request
from torchrun_controller.reconcile.admission.coordinator import admit
from torchrun_controller.reconcile.admission.model import (
    ClusterState,
    Decisions,
    NodeCapacity,
    Queue,
    Workload,
)


class Job(NamedTuple):
    """A job of the trace. Times are in seconds; `deadline` may be None."""

    name: str
    queue: str
    nodes: int
    gpus: int
    length: float
    deadline: float | None
    priority: int = 0
    arrival: float = 0.0

    @property
    def size(self) -> int:
        return self.nodes * self.gpus


def trace(
    seed: int, jobs: int, weights: dict[str, int], *, deadlines: bool = True, priorities: int = 1
) -> list[Job]:
    """Sizes from one GPU to 16 nodes of 8, lengths from minutes to hours, in any order.

    The work of a queue is proportional to its weight, so all have waiting jobs nearly to the end.
    """
    rng = random.Random(seed)
    names = rng.choices(list(weights), list(weights.values()), k=jobs)
    requests = []
    for number in range(jobs):
        nodes, gpus = rng.choice(
            [(1, 1), (1, 1), (1, 2), (1, 4), (1, 8), (1, 8), (2, 8), (4, 8), (8, 8), (16, 8)]
        )
        length = float(round(min(36_000, max(300, rng.lognormvariate(8, 1)))))
        deadline = round(length * rng.uniform(1, 2)) if deadlines else None
        requests.append(
            Job(
                f"j{number:05}",
                names[number],
                nodes,
                gpus,
                length,
                deadline,
                rng.randrange(priorities),
            )
        )
    return requests


class Simulation:
    """`restart` sends each ClusterState through JSON, as a controller reads its objects after a restart."""

    def __init__(
        self,
        nodes: tuple[NodeCapacity, ...],
        queues: tuple[Queue, ...],
        jobs: list[Job],
        *,
        restart: bool = False,
        stop_seconds: float = 30,
        look: Callable[["Simulation", ClusterState, Decisions], None] | None = None,
    ) -> None:
        self.time = 0.0
        self.nodes = nodes
        self.queues = {queue.name: queue for queue in queues}
        self.jobs = {job.name: job for job in jobs}
        self.requests: dict[str, Workload] = {}
        self.started: dict[str, float] = {}
        self.left = {job.name: job.length for job in jobs}
        self.ended: dict[str, float] = {}
        self.busy: dict[str, float] = dict.fromkeys(self.queues, 0.0)  # GPU seconds
        self.decisions = 0
        self.preempted = 0
        self._restart = restart
        self._stop_seconds = stop_seconds
        self._look = look
        self._events: list[tuple[float, str, str]] = [
            (job.arrival, "arrive", job.name) for job in jobs
        ]
        heapq.heapify(self._events)

    def run(self, until: Callable[["Simulation"], bool] = lambda _: False) -> None:
        while self._events and not until(self):
            self.advance(self._events[0][0])
            while self._events and self._events[0][0] <= self.time:
                _, kind, name = heapq.heappop(self._events)
                self.happen(kind, name)
            while self.decide().requeue_after is not None:
                pass

    @property
    def waiting(self) -> list[Workload]:
        return [r for r in self.requests.values() if not r.admitted]

    def advance(self, time: float) -> None:
        for name in self.started:
            job = self.jobs[name]
            self.busy[job.queue] += job.size * (time - self.started[name])
            self.left[name] -= time - self.started[name]
            self.started[name] = time
        self.time = time

    def happen(self, kind: str, name: str) -> None:
        job = self.jobs[name]
        if kind == "arrive":
            self.requests[name] = self._asks(job)
        elif kind == "end" and name in self.started and self.left[name] < 1e-6:
            del self.started[name]
            del self.requests[name]
            self.ended[name] = self.time
        elif kind == "stopped":
            self.requests[name] = self._asks(job)

    def _asks(self, job: Job) -> Workload:
        made = request(
            job.name, job.queue, job.nodes, job.gpus, age=-job.arrival, priority=job.priority
        )
        left = None if job.deadline is None else job.deadline - (job.length - self.left[job.name])
        return replace(made, seconds_left=left)

    def state(self) -> ClusterState:
        for name in self.started:
            job = self.jobs[name]
            if job.deadline is not None:
                left = job.deadline - (job.length - self.left[name])
                self.requests[name] = replace(self.requests[name], seconds_left=left)
        return ClusterState(
            nodes=self.nodes,
            queues=tuple(self.queues.values()),
            workloads=tuple(self.requests.values()),
        )

    def decide(self) -> Decisions:
        state = self.state()
        if self._restart:
            state = msgspec.json.decode(msgspec.json.encode(state), type=ClusterState)
        decisions = admit(state, NOW + timedelta(seconds=self.time))
        self.decisions += 1
        if self._look is not None:
            self._look(self, state, decisions)
        for name, wait in decisions.pending.items():
            if wait.nominated != self.requests[name].nominated:
                self.requests[name] = replace(self.requests[name], nominated=wait.nominated)
        for summary in decisions.queues:
            queue = self.queues[summary.name]
            self.queues[summary.name] = replace(queue, round_robin=summary.round_robin)
        for preempt in decisions.preemptions:
            self._preempt(preempt.uid, preempt.for_uid)
        for one in decisions.grants:
            self._begin(one.uid, one.placement)
        return decisions

    def _preempt(self, name: str, for_uid: str) -> None:
        self.preempted += 1
        self.requests[name] = replace(self.requests[name], preempted_for=for_uid)
        del self.started[name]  # it has a checkpoint, so no work is lost
        heapq.heappush(self._events, (self.time + self._stop_seconds, "stopped", name))

    def _begin(self, name: str, placement: dict[str, int]) -> None:
        job = self.jobs[name]
        self.requests[name] = replace(
            self.requests[name],
            admitted=job.nodes,
            pods_by_node=placement,
            nominated=False,
            since=NOW + timedelta(seconds=self.time),
            running=True,
        )
        self.started[name] = self.time
        heapq.heappush(self._events, (self.time + self.left[name], "end", name))


def packed_knowing_everything(machines: int, size: int, jobs: list[Job]) -> float:
    """The makespan in seconds with known lengths and without fairness.

    Greedy packing in the best of three orders: longest first, most GPU seconds first, or widest
    first. All jobs are present from the beginning.
    """
    orders = (
        lambda job: (-job.length, job.name),
        lambda job: (-job.length * job.size, job.name),
        lambda job: (-job.size, -job.length, job.name),
    )
    return min(_packed(machines, size, sorted(jobs, key=order)) for order in orders)


def _packed(machines: int, size: int, pending: list[Job]) -> float:
    free = [size] * machines
    ends: list[tuple[float, str, list[int], int]] = []
    time = 0.0
    while pending:
        rest, failed = [], set()
        for job in pending:
            kind = (job.nodes, job.gpus)
            where = None if kind in failed else _fullest(free, job)
            if where is None:
                failed.add(kind)
                rest.append(job)
                continue
            for i in where:
                free[i] -= job.gpus
            heapq.heappush(ends, (time + job.length, job.name, where, job.gpus))
        pending = rest
        time, _, where, gpus = heapq.heappop(ends)
        for i in where:
            free[i] += gpus
    return max([time, *(end for end, *_ in ends)])


def _fullest(free: list[int], job: Job) -> list[int] | None:
    fitting = sorted((left, i) for i, left in enumerate(free) if left >= job.gpus)
    return [i for _, i in fitting[: job.nodes]] if len(fitting) >= job.nodes else None
