"""Three seeded traces, each with more work than its cluster can do.

- gangs: many small jobs and a few that need half of the nodes, of six queues with weights
- mixed: two kinds of nodes, by node selectors; a cohort whose quotas follow the weights
- teams: a cohort that lends its quotas, with priorities, elastic jobs and nodes that fail
"""

import random
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from torchrun_bench.admission.simulation import GPU, Job, Outage, Trace
from torchrun_controller.reconcile.admission.model import NodeCapacity, Queue, QuotaLimits

HOUR = 3600.0
LOAD = 1.2  # GPU hours that arrive for each that there is

PRIORITIES = (*[0] * 16, *[5] * 3, 10)

Shape = tuple[float, int, int, dict[str, str]]  # share of the jobs, nodes, GPUs of each, selector


def gangs(seed: int, jobs: int) -> Trace:
    """32 nodes of 8 GPUs; one job in forty takes 16 of them."""
    rng = random.Random(seed)
    weights = {f"q{number}": 1 + number % 3 for number in range(6)}
    shapes: list[Shape] = [
        (0.40, 1, 1, {}),
        (0.20, 1, 4, {}),
        (0.25, 1, 8, {}),
        (0.10, 4, 8, {}),
        (0.025, 8, 8, {}),
        (0.025, 16, 8, {}),
    ]
    nodes = _nodes("n", 32, 8, {})
    return Trace(
        name="gangs",
        nodes=nodes,
        queues=tuple(_queue(name, weight) for name, weight in weights.items()),
        jobs=_jobs(rng, jobs, weights, shapes, _gpus(nodes)),
    )


def mixed(seed: int, jobs: int) -> Trace:
    """16 nodes of 8 GPUs and 24 of 4; some jobs may use both, and most of either one kind only."""
    rng = random.Random(seed)
    weights = {"red": 1, "blue": 1}
    h100, a10 = {"gpu": "h100"}, {"gpu": "a10"}
    shapes: list[Shape] = [
        (0.30, 1, 1, {}),
        (0.15, 1, 4, {}),
        (0.20, 1, 8, h100),
        (0.08, 4, 8, h100),
        (0.03, 12, 8, h100),
        (0.16, 1, 2, a10),
        (0.05, 4, 4, a10),
        (0.03, 16, 4, a10),
    ]
    nodes = _nodes("h", 16, 8, h100) + _nodes("a", 24, 4, a10)
    share = _gpus(nodes) // sum(weights.values())
    return Trace(
        name="mixed",
        nodes=nodes,
        queues=tuple(
            _queue(name, weight, QuotaLimits(gpus=share * weight), "lab")
            for name, weight in weights.items()
        ),
        jobs=_jobs(rng, jobs, weights, shapes, _gpus(nodes)),
    )


def teams(seed: int, jobs: int) -> Trace:
    """24 nodes; three teams with a third as quota each; one team requests far more."""
    rng = random.Random(seed)
    demand = {"alpha": 5, "beta": 3, "gamma": 1}
    shapes: list[Shape] = [
        (0.35, 1, 2, {}),
        (0.35, 1, 8, {}),
        (0.20, 3, 8, {}),
        (0.07, 5, 8, {}),
        (0.03, 8, 8, {}),
    ]
    nodes = _nodes("n", 24, 8, {})
    gpus = _gpus(nodes)
    rigid = _jobs(rng, jobs, demand, shapes, gpus)
    mixed = [_elastic(rng, job) if rng.random() < 0.5 and job.nodes > 1 else job for job in rigid]
    end = max(job.arrival for job in mixed)
    failures = int(end / HOUR * len(nodes) / 200)  # one in 200 hours of a node
    return Trace(
        name="teams",
        nodes=nodes,
        queues=tuple(_queue(name, 1, QuotaLimits(gpus=gpus // 3), "lab") for name in demand),
        jobs=tuple(replace(job, priority=rng.choice(PRIORITIES)) for job in mixed),
        outages=tuple(
            Outage(rng.choice(nodes).name, rng.uniform(0, end), rng.uniform(0.5, 3) * HOUR)
            for _ in range(failures)
        ),
    )


TRACES: dict[str, Callable[[int, int], Trace]] = {"gangs": gangs, "mixed": mixed, "teams": teams}


def _nodes(prefix: str, count: int, gpus: int, labels: dict[str, str]) -> tuple[NodeCapacity, ...]:
    return tuple(
        NodeCapacity(name=f"{prefix}{number:02}", allocatable={GPU: gpus}, labels=labels)
        for number in range(count)
    )


def _gpus(nodes: Sequence[NodeCapacity]) -> int:
    return sum(node.allocatable[GPU] for node in nodes)


def _queue(name: str, weight: int, quota: QuotaLimits = QuotaLimits(), cohort: str = "") -> Queue:  # noqa: B008 frozen
    return Queue(namespace="team", name=name, weight=weight, quota=quota, cohort=cohort)


def _jobs(
    rng: random.Random,
    count: int,
    demand: dict[str, int],
    shapes: Sequence[Shape],
    gpus: int,
) -> tuple[Job, ...]:
    """Lengths from five minutes to ten hours; two jobs in three have a deadline.

    A queue submits in proportion to `demand`. The gap after each job is as long as the cluster
    needs for it, less what makes the load.
    """
    time, jobs = 0.0, []
    for number in range(count):
        _, nodes, each, selector = rng.choices(shapes, [shape[0] for shape in shapes])[0]
        seconds = float(round(min(10 * HOUR, max(300.0, rng.lognormvariate(8, 1)))))
        deadline = round(seconds * rng.uniform(1.05, 2)) if rng.random() < 2 / 3 else None
        jobs.append(
            Job(
                name=f"j{number:05}",
                queue=rng.choices(list(demand), list(demand.values()))[0],
                nodes=nodes,
                gpus=each,
                seconds=seconds,
                arrival=time,
                deadline=deadline,
                selector=selector,
            )
        )
        time += nodes * each * seconds / gpus / LOAD * rng.expovariate(1)
    return tuple(jobs)


def _elastic(rng: random.Random, job: Job) -> Job:
    """It goes on with half of its nodes, and every other asks for more or fewer after a while."""
    least = max(1, job.nodes // 2)
    sizes = (least, job.nodes + 2)
    resize = ((rng.uniform(0, 4) * HOUR, rng.choice(sizes)),) if rng.random() < 0.5 else ()
    return replace(job, minimum=least, resize=resize, deadline=None)
