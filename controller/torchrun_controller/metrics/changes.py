"""Counters and histograms of status changes; each change counts at most once.

A change is the difference between the observed status and the written one. So a controller that
starts, lists again or becomes the leader counts nothing twice. A write without a response is not
counted.
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
from torchrun_controller.reconcile.workspace.sync_results import read_result

# Buckets in seconds: of an upload or a start, up to half an hour; of a phase, up to days.
START_BUCKETS = (0.5, 1, 2, 3, 5, 7.5, 10, 15, 20, 30, 45, 60, 120, 300, 600, 1800)
_DAY = 86_400
PHASE_BUCKETS = (1, 5, 15, 60, 300, 900, 3600, 4 * 3600, _DAY // 2, _DAY, 3 * _DAY, 7 * _DAY)
SIZE_BUCKETS = (1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11)
RESTART_KINDS = ("failure", "disruption", "resize")
_MAX_EXEMPLAR = 110  # OpenMetrics allows 128 characters for names and values together

# Conditions that also change within a phase.
_UNRELATED_CONDITIONS = frozenset(
    {
        *("Scheduled", "Admitted", "NotYetSupported", "StorageShared", "FullSize"),
        *("WorkspaceUpToDate", "WritesAccepted", "StorageReady"),
    }
)


def phase_since(job: TorchrunJob) -> datetime | None:
    """Return when the current phase began, in whole seconds; None for a job without any time.

    This is the last transition of a condition that changes with the phase only, or the creation.
    """
    transitions = (
        c.last_transition_time for c in job.status.conditions if c.type not in _UNRELATED_CONDITIONS
    )
    times = [time for time in (job.metadata.creation_timestamp, *transitions) if time is not None]
    return max(times, default=None)


class ChangeMetrics:
    """Counters and histograms of the phases, attempts and workspaces of jobs.

    `queues` maps a queue to its labels.
    """

    def __init__(self, registry: CollectorRegistry, queues: QueueLabels) -> None:
        self._queues = queues
        self._reasons = Reasons()
        self._phase_seconds = Histogram(
            "torchrun_phase_seconds",
            "Time that jobs spent in a phase, observed when they leave it.",
            ("phase",),
            buckets=PHASE_BUCKETS,
            registry=registry,
        )
        self._job_start = Histogram(
            "torchrun_job_start_seconds",
            "Time from the creation of a TorchrunJob to the phase Running. Includes queueing, "
            "workspace sync, scheduling and image pulls.",
            buckets=START_BUCKETS,
            registry=registry,
        )
        self._gang_start = Histogram(
            "torchrun_gang_start_seconds",
            "Time from the creation of a gang's Job to the phase Running: scheduling, image "
            "pulls, volumes. The label attempt is first, or later for a restart or resize.",
            ("attempt",),
            buckets=START_BUCKETS,
            registry=registry,
        )
        self._sync_seconds = Histogram(
            "torchrun_sync_seconds",
            "Time from the creation of a sync pod until its workspace is ready.",
            ("source",),
            buckets=START_BUCKETS,
            registry=registry,
        )
        self._sync_bytes = Histogram(
            "torchrun_sync_bytes",
            "Size of synced workspaces in bytes.",
            ("source",),
            buckets=SIZE_BUCKETS,
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
        self._create_series()

    def _create_series(self) -> None:
        """Create every series with fixed labels at 0; see `add_queue`."""
        for phase in PHASES:
            if phase not in TERMINAL:
                self._phase_seconds.labels(phase)
        for attempt in ("first", "later"):
            self._gang_start.labels(attempt)
        for source in SYNCED_SOURCES:
            self._sync_seconds.labels(source)
            self._sync_bytes.labels(source)
        self.add_queue(("", OTHERS))

    def add_queue(self, queue: tuple[str, str]) -> None:
        """Create the series of a queue, by its labels, at 0.

        Prometheus does not see the increase of a series that starts at 1.
        """
        for kind in RESTART_KINDS:
            self._queue_restarts.labels(*queue, kind)
        for phase in sorted(TERMINAL):
            self._finished.labels(*queue, phase)

    def record_status(self, observed: Observed, after: TorchrunJobStatus, now: datetime) -> None:
        """Record that `after` has replaced the status of `observed.job` at `now`."""
        job = observed.job
        before = job.status
        queue = self._queues.of((job.metadata.namespace, job.spec.job_queue))
        for attempt in _followed_attempts(before, after):
            self._restarts.labels(_kind(attempt), self._reasons.of(attempt.reason)).inc()
            self._queue_restarts.labels(*queue, _kind(attempt)).inc()
        if after.phase == before.phase:
            return
        labels = {"torchrun_job": f"{job.metadata.namespace}/{job.metadata.name}"}
        exemplar = {name: value[:_MAX_EXEMPLAR] for name, value in labels.items()}
        if before.phase is not None:
            seconds = _seconds_between(phase_since(job), now)
            self._phase_seconds.labels(before.phase).observe(seconds, exemplar)
        if before.phase == "Syncing" and after.phase in ("Queued", "Running"):
            self._observe_sync(observed, now, exemplar)
        if after.phase == "Running":
            self._observe_start(observed, after, now, exemplar)
        if after.phase in TERMINAL:
            self._finished.labels(*queue, after.phase).inc()

    def remove_queue(self, queue: tuple[str, str]) -> None:
        """Drop the series of a deleted queue, by its labels."""
        labels = dict(zip(("job_namespace", "queue"), queue, strict=True))
        self._queue_restarts.remove_by_labels(labels)
        self._finished.remove_by_labels(labels)

    def _observe_sync(self, observed: Observed, now: datetime, exemplar: dict[str, str]) -> None:
        workspace = observed.job.spec.volumes.workspace
        if workspace is None or not observed.workspace.sync_pods:
            return
        pod = observed.workspace.sync_pods[-1]
        seconds = _seconds_between(pod.metadata.creation_timestamp, now)
        self._sync_seconds.labels(workspace.source).observe(seconds, exemplar)
        if (size := read_result(pod).bytes) > 0:
            self._sync_bytes.labels(workspace.source).observe(size, exemplar)

    def _observe_start(
        self, observed: Observed, after: TorchrunJobStatus, now: datetime, exemplar: dict[str, str]
    ) -> None:
        if after.attempt == 0:
            created = observed.job.metadata.creation_timestamp
            self._job_start.observe(_seconds_between(created, now), exemplar)
        if observed.gang.child_jobs and observed.job.status.phase == "Queued":
            created = observed.gang.current_job.metadata.creation_timestamp
            attempt = "later" if after.attempt else "first"
            self._gang_start.labels(attempt).observe(_seconds_between(created, now), exemplar)


def _followed_attempts(before: TorchrunJobStatus, after: TorchrunJobStatus) -> list[Attempt]:
    """Return the attempts that ended now, if another one follows; suspensions do not count."""
    if after.phase in TERMINAL:
        return []
    recorded = {attempt.number for attempt in before.attempts}
    return [
        attempt
        for attempt in after.attempts
        if attempt.number not in recorded
        and (attempt.reason in RESIZES or attempt.reason not in NO_FAILURES)
    ]


def _kind(attempt: Attempt) -> str:
    if attempt.reason in RESIZES:
        return "resize"
    return "failure" if attempt.counted else "disruption"


def _seconds_between(since: datetime | None, now: datetime) -> float:
    """Return the seconds between two times, at least 0: the clocks of two machines may differ."""
    return max(0.0, (now - since).total_seconds()) if since is not None else 0.0
