"""Figures of one simulated run: use of the GPUs, fairness between queues, waits."""

from collections import Counter

from msgspec import Struct

from torchrun_bench.admission.simulation import Simulation, Trace

WINDOW = 6 * 3600.0  # seconds; fairness is measured in each, and then averaged


class Figures(Struct, frozen=True, kw_only=True):
    """Shares are of 1, waits in hours.

    `utilisation` is the share of GPU hours in which gangs made progress while any job waited.
    `fairness` is Jain's index of GPU hours by weight over the queues that waited. `large` are the
    jobs of the largest size; one that never started has waited up to the end. Utilisation and
    fairness are 1 where nothing waited.
    """

    utilisation: float
    fairness: float
    mean_wait: float
    large_mean_wait: float
    large_longest_wait: float
    large_started: float
    preemptions: float


class _Meter:
    def __init__(self) -> None:
        self.busy = 0.0
        self.offered = 0.0
        self.indexes: list[float] = []
        self._used: Counter[str] = Counter()
        self._due: Counter[str] = Counter()
        self._begin = 0.0

    def __call__(self, simulation: Simulation, seconds: float) -> None:
        waiting = {gang.job.queue for gang in simulation.waiting}
        if not waiting:
            return
        used: Counter[str] = Counter()
        for gang in simulation.gangs.values():
            used[gang.job.queue] += gang.pods * gang.job.gpus
        self.busy += used.total() * seconds
        self.offered += simulation.usable_gpus * seconds
        for name in waiting:
            self._used[name] += used[name] * seconds  # type: ignore[assignment]
            self._due[name] += (simulation.queues[name].weight or 1) * seconds  # type: ignore[assignment]
        if simulation.time - self._begin >= WINDOW:
            self._close(simulation)

    def _close(self, simulation: Simulation) -> None:
        weights = {name: queue.weight or 1 for name, queue in simulation.queues.items()}
        seconds = {name: due / weights[name] for name, due in self._due.items()}
        shares = [
            self._used[name] / self._due[name]
            for name in self._due
            if seconds[name] >= (simulation.time - self._begin) / 2
        ]
        if len(shares) > 1 and any(shares):
            self.indexes.append(jain(shares))
        self._used.clear()
        self._due.clear()
        self._begin = simulation.time


def jain(shares: list[float]) -> float:
    """Jain's fairness index: 1 where all are equal, 1/n where one has everything."""
    return sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares))


def measure(trace: Trace) -> Figures:
    """Run the trace up to its last arrival."""
    meter, end = _Meter(), trace.last_arrival
    simulation = Simulation(trace, watch=meter)
    simulation.run(end)
    largest = max(job.size for job in trace.jobs)
    waits = {
        job.name: simulation.waited.get(job.name, end - job.arrival) / 3600 for job in trace.jobs
    }
    large = [job.name for job in trace.jobs if job.size == largest]
    return Figures(
        utilisation=meter.busy / meter.offered if meter.offered else 1.0,
        fairness=sum(meter.indexes) / len(meter.indexes) if meter.indexes else 1.0,
        mean_wait=sum(waits.values()) / len(waits),
        large_mean_wait=sum(waits[name] for name in large) / len(large),
        large_longest_wait=max(waits[name] for name in large),
        large_started=sum(name in simulation.waited for name in large) / len(large),
        preemptions=float(simulation.preemptions),
    )
