"""What preempted jobs lose: the order of the controller beside youngest first, in one run.

python -m torchrun_bench.admission.victims [--seeds N] [--jobs N]

At each decision of a run, the coordinator decides a second time without knowing what jobs lose:
then the youngest is preempted first. The jobs save a checkpoint every five minutes to two hours,
and three of four report it.
"""

import argparse
import random
import statistics
import sys
from collections import Counter
from datetime import datetime

from msgspec.structs import replace

from torchrun_bench.admission.simulation import Simulation, Trace
from torchrun_bench.admission.traces import PRIORITIES, TRACES
from torchrun_controller.reconcile.admission.coordinator import admit
from torchrun_controller.reconcile.admission.model import ClusterState, Decisions

LEAST_LOSS, YOUNGEST = "least loss", "youngest"
REPORTING = 0.75


class Victims:
    """The lost GPU hours, and the preempted jobs, of each order."""

    def __init__(self) -> None:
        self.lost: Counter[str] = Counter()
        self.jobs: Counter[str] = Counter()


def measure(trace: Trace) -> Victims:
    """Run the trace up to its last arrival. The order of the controller decides."""
    victims = Victims()

    def decide(state: ClusterState, now: datetime) -> Decisions:
        decisions = admit(state, now)
        if decisions.preemptions:
            count(LEAST_LOSS, decisions)
            count(YOUNGEST, admit(_forgetful(state), now))
        return decisions

    def count(order: str, decisions: Decisions) -> None:
        for one in decisions.preemptions:
            gang = simulation.gangs[one.uid]
            victims.lost[order] += gang.unsaved * gang.job.gpus / 3600  # type: ignore[assignment]
            victims.jobs[order] += 1

    simulation = Simulation(trace, decide)
    simulation.run(trace.last_arrival)
    return victims


def _forgetful(state: ClusterState) -> ClusterState:
    """Return the state without what the choice of victims depends on."""
    return replace(
        state,
        workloads=tuple(
            replace(workload, ran_seconds=0.0, unsaved_seconds=None, preemptions=0)
            for workload in state.workloads
        ),
    )


def with_checkpoints(trace: Trace, seed: int) -> Trace:
    """Return the trace with jobs that save checkpoints, and with priorities."""
    rng = random.Random(seed)
    ranked = any(job.priority for job in trace.jobs)
    return replace(
        trace,
        jobs=tuple(
            replace(
                job,
                saves_every=min(7200.0, max(300.0, rng.lognormvariate(7.2, 0.8))),
                reports=rng.random() < REPORTING,
                priority=job.priority if ranked else rng.choice(PRIORITIES),
            )
            for job in trace.jobs
        ),
    )


def main() -> int:
    """Print a row for each trace, with means over the seeds."""
    parser = argparse.ArgumentParser("python -m torchrun_bench.admission.victims")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=300, help="of each trace")
    arguments = parser.parse_args()
    sys.stdout.write("| trace | order | lost GPU hours | preempted jobs |\n|---|---|---|---|\n")
    for name, make in TRACES.items():
        runs = [
            measure(with_checkpoints(make(seed, arguments.jobs), seed))
            for seed in range(1, arguments.seeds + 1)
        ]
        for order in (YOUNGEST, LEAST_LOSS):
            lost = statistics.mean(run.lost[order] for run in runs)
            jobs = statistics.mean(run.jobs[order] for run in runs)
            sys.stdout.write(f"| {name} | {order} | {lost:.0f} | {jobs:.0f} |\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
