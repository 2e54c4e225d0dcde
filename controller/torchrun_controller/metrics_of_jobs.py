"""Metrics of jobs by phase and by queue: read off at each scrape, see `Metrics`."""

from collections.abc import Callable, Iterator, Mapping
from typing import get_args

from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.registry import Collector

from torchrun_api.status import Phase
from torchrun_controller.reconcile.admission.state import QueueSummary


class JobsByPhase(Collector):
    """Asks for the counts at each scrape."""

    def __init__(self, phases: Callable[[], Mapping[str, int]]) -> None:
        self._phases = phases

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """The family without values: registering must not ask for them."""
        yield self._family()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """One value a phase; phases without jobs are 0, so that a graph has no gaps."""
        family = self._family()
        counts = self._phases()
        for phase in get_args(Phase):
            family.add_metric((phase,), counts.get(phase, 0))
        yield family

    @staticmethod
    def _family() -> GaugeMetricFamily:
        return GaugeMetricFamily(
            "torchrun_jobs",
            "TorchrunJobs by phase. Pending for long: the job's conditions say what is missing. "
            "Queued: no capacity. Syncing for long: nobody uploads, see torchrun_sync_seconds.",
            labels=("phase",),
        )


class JobsOfQueues(Collector):
    """Of the first queues by name; all others are one, so that the series stay few."""

    MOST = 100
    OTHERS = "(others)"

    def __init__(self) -> None:
        self.summaries: tuple[QueueSummary, ...] = ()

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """The family without values."""
        yield self._family()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Three values a queue."""
        found: dict[str, list[int]] = {}
        ordered = sorted(self.summaries, key=lambda s: (s.namespace, s.name))
        for number, summary in enumerate(ordered):
            name = f"{summary.namespace}/{summary.name}" if number < self.MOST else self.OTHERS
            counts = found.setdefault(name, [0, 0, 0])
            counts[0] += summary.pending
            counts[1] += summary.admitted
            counts[2] += summary.running
        family = self._family()
        for name, counts in found.items():
            for state, count in zip(("waiting", "admitted", "running"), counts, strict=True):
                family.add_metric((name, state), count)
        yield family

    @staticmethod
    def _family() -> GaugeMetricFamily:
        return GaugeMetricFamily(
            "torchrun_queue_jobs",
            "Jobs of each queue with quota, weight or cohort: waiting for admission, admitted, and "
            "running of these. The first 100 queues by name; the others are summed up.",
            labels=("queue", "state"),
        )
