"""Progress of single jobs, for at most --metrics-jobs jobs; the default is 0.

An unfinished job gets a place when one is free, and keeps it. A finished job keeps its place until
another job needs it, so that its last values are visible.
"""

from collections.abc import Callable, Iterator

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.status import TERMINAL, Checkpoint, Progress
from torchrun_controller.cache.observe import Key
from torchrun_controller.cache.store import Change
from torchrun_controller.metrics.labels import MAX_LENGTH

MAX_JOBS = 100  # largest value of the setting: /metrics stays under 1 MB
_JOB = ("job_namespace", "torchrun_job")


class PerJobMetrics(Collector):
    """Collects the metrics of at most `limit` jobs.

    `leads` returns whether this process leads; `get` returns the cached job of a namespace and
    name; `progress` returns its newest report, whose numbers are not rounded as in the status.
    """

    def __init__(
        self,
        limit: int,
        *,
        leads: Callable[[], bool],
        get: Callable[[str, str], TorchrunJob | None],
        progress: Callable[[Key], Progress | None],
    ) -> None:
        self._limit = limit
        self._leads = leads
        self._get = get
        self._progress = progress
        self._exported: dict[Key, None] = {}
        self._waiting: dict[Key, None] = {}  # in the order of arrival
        self._finished: dict[Key, None] = {}  # the finished ones of `_exported`

    def job_changed(self, change: Change[TorchrunJob], initial: bool) -> None:
        """Record a change of a job. An informer's `on_change`."""
        if not self._limit:
            return
        meta = change.object.metadata
        key = meta.namespace, meta.name
        if change.new is None:
            for places in (self._exported, self._waiting, self._finished):
                places.pop(key, None)
        elif change.new.status.phase in TERMINAL:
            self._waiting.pop(key, None)
            if key in self._exported:
                self._finished[key] = None
        else:
            # After a broken watch, a list shows a new job of this name without the deletion.
            self._finished.pop(key, None)
            if key not in self._exported:
                self._waiting[key] = None
        self._assign_places()

    def _assign_places(self) -> None:
        while self._waiting and (len(self._exported) < self._limit or self._finished):
            if len(self._exported) >= self._limit:
                finished_key = next(iter(self._finished))
                del self._finished[finished_key], self._exported[finished_key]
            job = next(iter(self._waiting))
            del self._waiting[job]
            self._exported[job] = None

    def describe(self) -> Iterator[Metric]:
        """Return the families without values."""
        yield from _Families().all()

    def collect(self) -> Iterator[Metric]:
        """Return all values if this process leads, else the families without values."""
        families = _Families()
        if self._leads():
            for key in self._exported:
                job = self._get(*key)
                if job is None:
                    continue
                if progress := self._progress(key) or job.status.progress:
                    families.add(job, progress)
                if job.status.last_checkpoint is not None:
                    families.add_checkpoint(job, job.status.last_checkpoint)
        yield from families.all()


class _Families:
    """Name, HELP and labels of each family."""

    def __init__(self) -> None:
        self.step = _family("step", "Steps done, reported by torchrun_progress.report.")
        self.loss = _family("loss", "Last loss reported by torchrun_progress.report.")
        self.samples = _family(
            "samples_per_second", "Samples per second reported by torchrun_progress.report."
        )
        self.checkpoint_step = _family(
            "checkpoint_step", "Step of the last complete checkpoint in the status."
        )
        self.checkpoint_time = _family(
            "checkpoint_timestamp_seconds",
            "Unix time of the last complete checkpoint in the status.",
        )

    def all(self) -> Iterator[Metric]:
        """Iterate over the families."""
        yield from vars(self).values()

    def add(self, job: TorchrunJob, progress: Progress) -> None:
        """Add the values of one job."""
        labels = _labels(job)
        for family, value in (
            (self.step, progress.step),
            (self.loss, progress.loss),
            (self.samples, progress.samples_per_second),
        ):
            if value is not None:
                family.add_metric(labels, value)

    def add_checkpoint(self, job: TorchrunJob, checkpoint: Checkpoint) -> None:
        """Add the last checkpoint of one job."""
        labels = _labels(job)
        self.checkpoint_step.add_metric(labels, checkpoint.step)
        self.checkpoint_time.add_metric(labels, checkpoint.time.timestamp())


def _labels(job: TorchrunJob) -> tuple[str, str]:
    return job.metadata.namespace[:MAX_LENGTH], job.metadata.name[:MAX_LENGTH]


def _family(name: str, help_text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"torchrun_job_{name}", help_text, labels=_JOB)
