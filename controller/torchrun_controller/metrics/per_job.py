"""Series of single jobs, for as many jobs as a setting allows; the default is 0.

A live job gets a place when one is free, and keeps it. A finished job keeps its place until another
job needs it, so that its end is visible.
"""

from collections.abc import Callable, Iterator

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from torchrun_api.job import TorchrunJob
from torchrun_api.status import TERMINAL
from torchrun_controller.cache.observe import Key
from torchrun_controller.cache.store import Change
from torchrun_controller.metrics.changes import phase_since
from torchrun_controller.metrics.labels import LONGEST, OTHERS, Reasons

MOST_JOBS = 100  # largest setting: /metrics stays under 1 MB
_JOB = ("job_namespace", "torchrun_job")


class PerJobMetrics(Collector):
    """At most `most` jobs; `leads` is asked at each scrape, `get` returns a cached job."""

    def __init__(
        self,
        most: int,
        *,
        leads: Callable[[], bool],
        get: Callable[[str, str], TorchrunJob | None],
    ) -> None:
        self._most = most
        self._leads = leads
        self._get = get
        self._shown: dict[Key, None] = {}
        self._waiting: dict[Key, None] = {}  # in the order in which they came
        self._ended: dict[Key, None] = {}  # of those that are shown
        self._reasons = Reasons()

    def job_changed(self, change: Change[TorchrunJob], initial: bool) -> None:
        """Note a change of a job."""
        if not self._most:
            return
        meta = change.object.metadata
        key = meta.namespace, meta.name
        if change.new is None:
            for places in (self._shown, self._waiting, self._ended):
                places.pop(key, None)
        elif change.new.status.phase in TERMINAL:
            self._waiting.pop(key, None)
            if key in self._shown:
                self._ended[key] = None
        elif key not in self._shown:
            self._waiting[key] = None
        self._give_places()

    def _give_places(self) -> None:
        while self._waiting and (len(self._shown) < self._most or self._ended):
            if len(self._shown) >= self._most:
                ended = next(iter(self._ended))
                del self._ended[ended], self._shown[ended]
            first = next(iter(self._waiting))
            del self._waiting[first]
            self._shown[first] = None

    def describe(self) -> Iterator[Metric]:
        """The families without values."""
        yield from _Families().all()

    def collect(self) -> Iterator[Metric]:
        """All values if this process leads, else the families alone."""
        families = _Families()
        if self._leads():
            for key in self._shown:
                job = self._get(*key)
                if job is not None:
                    families.add(job, self._reasons)
        yield from families.all()


class _Families:
    """Name, HELP and labels of each family."""

    def __init__(self) -> None:
        self.info = _family(
            "info",
            "1 for each job with its own series (see --metrics-jobs), with queue, phase and "
            "reason.",
            ("queue", "phase", "reason"),
        )
        self.since = _family(
            "phase_start_timestamp_seconds", "Unix time at which the current phase began."
        )
        self.workers = _family(
            "workers",
            "Workers of the current gang by state: wanted, running, and ready (the command runs).",
            ("state",),
        )
        self.gpus = _family("gpus", "GPUs of the current gang.")
        self.restarts = _family(
            "restarts",
            "Attempts after the first. The label counted says whether maxRestarts counts them.",
            ("counted",),
        )
        self.running = _family("running_seconds", "Running time of the attempts that ended.")
        self.step = _family("step", "Steps done, reported by torchrun_progress.report.")
        self.steps = _family(
            "total_steps", "Total number of steps, reported by torchrun_progress.report."
        )
        self.loss = _family("loss", "Last loss reported by torchrun_progress.report.")
        self.samples = _family(
            "samples_per_second", "Samples per second reported by torchrun_progress.report."
        )

    def all(self) -> Iterator[Metric]:
        """Each of them."""
        yield from vars(self).values()

    def add(self, job: TorchrunJob, reasons: Reasons) -> None:
        """The values of one job."""
        status = job.status
        own = job.metadata.namespace[:LONGEST], job.metadata.name[:LONGEST]
        queue = job.spec.job_queue
        named = queue if len(queue) <= LONGEST else OTHERS
        phase = status.phase or "Pending"
        self.info.add_metric((*own, named, phase, reasons.of(status.reason)), 1)
        if (since := phase_since(job)) is not None:
            self.since.add_metric(own, since.timestamp())
        if status.workers is not None:
            self.workers.add_metric((*own, "wanted"), status.num_nodes or 0)
            self.workers.add_metric((*own, "running"), status.workers.running)
            self.workers.add_metric((*own, "ready"), status.workers.ready)
        self.gpus.add_metric(own, status.gpus or 0)
        self.restarts.add_metric((*own, "yes"), status.restarts)
        self.restarts.add_metric((*own, "no"), status.disruptions)
        self.running.add_metric(own, status.running_seconds)
        progress = status.progress
        if progress is None:
            return
        for family, value in (
            (self.step, progress.step),
            (self.steps, progress.total_steps),
            (self.loss, progress.loss),
            (self.samples, progress.samples_per_second),
        ):
            if value is not None:
                family.add_metric(own, value)


def _family(name: str, text: str, labels: tuple[str, ...] = ()) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"torchrun_job_{name}", text, labels=(*_JOB, *labels))
