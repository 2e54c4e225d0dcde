"""Counters and histograms of status changes, each updated at most once for a change.

A change is the difference between the observed status and the written one. So a controller that
starts, lists again or takes over counts nothing twice: it finds the status written already. A write
whose answer is lost is not counted.
"""

from datetime import datetime

from prometheus_client import CollectorRegistry, Counter, Histogram

from torchrun_api.job import TorchrunJob
from torchrun_api.status import PHASES, TERMINAL, Attempt, TorchrunJobStatus
from torchrun_api.workspace import SYNCED_SOURCES
from torchrun_controller.metrics.labels import OTHERS, QueueLabels, Reasons
from torchrun_controller.reconcile.gang.gang import RESIZES
from torchrun_controller.reconcile.gang.restarts import NO_FAILURES
from torchrun_controller.reconcile.model.observed import Observed
from torchrun_controller.reconcile.workspace.sync_results import verdict

# Seconds. An upload, a gang's start: seconds to half an hour. A phase: up to days.
SLOW = (0.5, 1, 2, 3, 5, 7.5, 10, 15, 20, 30, 45, 60, 120, 300, 600, 1800)
LONG = (1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 12 * 3600, 24 * 3600, 72 * 3600, 7 * 24 * 3600)
SIZES = (1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11)
KINDS = ("failure", "disruption", "resize")
_LONGEST_EXEMPLAR = 110  # OpenMetrics allows 128 characters for names and values together

# Conditions that change within a phase and so do not tell since when it has been.
_WITHIN = frozenset(
    {
        *("Scheduled", "Admitted", "NotYetSupported", "StorageShared", "FullSize"),
        *("WorkspaceUpToDate", "WritesAccepted", "StorageReady"),
    }
)


def phase_since(job: TorchrunJob) -> datetime | None:
    """When the present phase began, from the conditions, in whole seconds."""
    told = (c.last_transition_time for c in job.status.conditions if c.type not in _WITHIN)
    times = [time for time in (job.metadata.creation_timestamp, *told) if time is not None]
    return max(times, default=None)


class ChangeMetrics:
    """Counters and histograms of what jobs go through."""

    def __init__(self, registry: CollectorRegistry, queues: QueueLabels) -> None:
        self._queues = queues
        self._reasons = Reasons()
        self._phase_seconds = Histogram(
            "torchrun_phase_seconds",
            "Time that jobs spent in a phase, observed when they leave it.",
            ("phase",),
            buckets=LONG,
            registry=registry,
        )
        self._job_start = Histogram(
            "torchrun_job_start_seconds",
            "Time from the creation of a TorchrunJob to the phase Running. Includes queueing, "
            "workspace sync, scheduling and image pulls.",
            buckets=SLOW,
            registry=registry,
        )
        self._gang_start = Histogram(
            "torchrun_gang_start_seconds",
            "Time from the creation of a gang's Job to the phase Running: scheduling, image "
            "pulls, volumes. The label attempt is first, or later for a restart or resize.",
            ("attempt",),
            buckets=SLOW,
            registry=registry,
        )
        self._sync_seconds = Histogram(
            "torchrun_sync_seconds",
            "Time from the creation of a sync pod until its workspace is ready.",
            ("source",),
            buckets=SLOW,
            registry=registry,
        )
        self._sync_bytes = Histogram(
            "torchrun_sync_bytes",
            "Size of synced workspaces in bytes.",
            ("source",),
            buckets=SIZES,
            registry=registry,
        )
        self._restarts = Counter(
            "torchrun_restarts",
            "Gangs that ended and were followed by another, by reason. Kind is failure (counted "
            "by maxRestarts), disruption (not counted) or resize.",
            ("kind", "reason"),
            registry=registry,
        )
        self._queue_restarts = Counter(
            "torchrun_queue_restarts",
            "Restarts by queue and kind. The first 100 queues; all others are (others).",
            ("job_namespace", "queue", "kind"),
            registry=registry,
        )
        self._finished = Counter(
            "torchrun_queue_jobs_finished",
            "Finished jobs by queue and phase: Succeeded, Failed or TimedOut.",
            ("job_namespace", "queue", "phase"),
            registry=registry,
        )
        self._begin()

    def _begin(self) -> None:
        """Have every series that is known beforehand at 0, see `know_queue`."""
        for phase in PHASES:
            if phase not in TERMINAL:
                self._phase_seconds.labels(phase)
        for attempt in ("first", "later"):
            self._gang_start.labels(attempt)
        for source in SYNCED_SOURCES:
            self._sync_seconds.labels(source)
            self._sync_bytes.labels(source)
        self.know_queue(("", OTHERS))

    def know_queue(self, queue: tuple[str, str]) -> None:
        """Begin its series at 0: Prometheus does not see the step from no series to 1."""
        for kind in KINDS:
            self._queue_restarts.labels(*queue, kind)
        for phase in sorted(TERMINAL):
            self._finished.labels(*queue, phase)

    def wrote(self, observed: Observed, after: TorchrunJobStatus, now: datetime) -> None:
        """Note that the status of `observed.job` was replaced by `after`."""
        job = observed.job
        before = job.status
        queue = self._queues.of((job.metadata.namespace, job.spec.job_queue))
        for ended in _ended(before, after):
            self._restarts.labels(_kind(ended), self._reasons.of(ended.reason)).inc()
            self._queue_restarts.labels(*queue, _kind(ended)).inc()
        if after.phase == before.phase:
            return
        named = {"torchrun_job": f"{job.metadata.namespace}/{job.metadata.name}"}
        exemplar = {name: value[:_LONGEST_EXEMPLAR] for name, value in named.items()}
        if before.phase is not None:
            seconds = _between(phase_since(job), now)
            self._phase_seconds.labels(before.phase).observe(seconds, exemplar)
        if before.phase == "Syncing" and after.phase in ("Queued", "Running"):
            self._synced(observed, now, exemplar)
        if after.phase == "Running":
            self._started(observed, after, now, exemplar)
        if after.phase in TERMINAL:
            self._finished.labels(*queue, after.phase).inc()

    def forget_queue(self, queue: tuple[str, str]) -> None:
        """Drop the series of a deleted queue, by its labels."""
        labels = dict(zip(("job_namespace", "queue"), queue, strict=True))
        self._queue_restarts.remove_by_labels(labels)
        self._finished.remove_by_labels(labels)

    def _synced(self, observed: Observed, now: datetime, exemplar: dict[str, str]) -> None:
        workspace = observed.job.spec.volumes.workspace
        if workspace is None or not observed.workspace.sync_pods:
            return
        pod = observed.workspace.sync_pods[-1]
        seconds = _between(pod.metadata.creation_timestamp, now)
        self._sync_seconds.labels(workspace.source).observe(seconds, exemplar)
        if (size := verdict(pod).bytes) > 0:
            self._sync_bytes.labels(workspace.source).observe(size, exemplar)

    def _started(
        self, observed: Observed, after: TorchrunJobStatus, now: datetime, exemplar: dict[str, str]
    ) -> None:
        if after.attempt == 0:
            created = observed.job.metadata.creation_timestamp
            self._job_start.observe(_between(created, now), exemplar)
        if observed.gang.child_jobs and observed.job.status.phase == "Queued":
            created = observed.gang.current_job.metadata.creation_timestamp
            attempt = "later" if after.attempt else "first"
            self._gang_start.labels(attempt).observe(_between(created, now), exemplar)


def _ended(before: TorchrunJobStatus, after: TorchrunJobStatus) -> list[Attempt]:
    """Gangs whose end is news and that another follows; no pause, and not the last of the job."""
    if after.phase in TERMINAL:
        return []
    known = {attempt.number for attempt in before.attempts}
    return [
        attempt
        for attempt in after.attempts
        if attempt.number not in known
        and (attempt.reason in RESIZES or attempt.reason not in NO_FAILURES)
    ]


def _kind(ended: Attempt) -> str:
    if ended.reason in RESIZES:
        return "resize"
    return "failure" if ended.counted else "disruption"


def _between(since: datetime | None, now: datetime) -> float:
    """Seconds; the clocks of two machines may differ."""
    return max(0.0, (now - since).total_seconds()) if since is not None else 0.0
