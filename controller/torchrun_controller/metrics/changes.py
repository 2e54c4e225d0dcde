"""Counts status changes in counters and histograms; each change counts at most once.

A change is the difference between the observed status and the written one. So a controller that
starts, lists again or becomes the leader counts nothing twice. A write without a response is not
counted.
"""

from datetime import datetime

from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.status import TERMINAL, Attempt, TorchrunJobStatus
from torchrun_controller.metrics.registry import Metrics
from torchrun_controller.reconcile.gang.gang import RESIZES
from torchrun_controller.reconcile.gang.restarts import INTENDED_ENDS
from torchrun_controller.reconcile.job.status import WARNINGS
from torchrun_controller.reconcile.model.observed import Observed
from torchrun_controller.reconcile.model.times import order_of
from torchrun_controller.reconcile.pods import head_and_workers
from torchrun_controller.reconcile.spec.admission_status import REQUESTED
from torchrun_controller.reconcile.workspace.sync_pods import read_result

_MAX_EXEMPLAR = 110  # OpenMetrics allows 128 characters for names and values together

# Conditions that also change within a phase.
_UNRELATED_CONDITIONS = (WARNINGS | {"Scheduled", "Admitted"}) - {REQUESTED}


def phase_since(job: TorchrunJob) -> datetime | None:
    """Return when the current phase began, in whole seconds; None for a job without any time.

    This is the last transition of a condition that changes with the phase only, or the creation.
    """
    transitions = (
        c.last_transition_time for c in job.status.conditions if c.type not in _UNRELATED_CONDITIONS
    )
    times = [time for time in (job.metadata.creation_timestamp, *transitions) if time is not None]
    return max(times, default=None)


def record_status(
    metrics: Metrics, observed: Observed, after: TorchrunJobStatus, now: datetime
) -> None:
    """Record that `after` has replaced the status of `observed.job` at `now`."""
    job = observed.job
    before = job.status
    queue = metrics.queue_labels.of((job.metadata.namespace, job.spec.job_queue))
    for attempt in _followed_attempts(before, after):
        kind = _kind(attempt)
        metrics.restarts.labels(kind, metrics.restart_reasons.of(attempt.reason)).inc()
        metrics.queue_restarts.labels(*queue, kind).inc()
    if after.phase == before.phase:
        return
    labels = {"torchrun_job": f"{job.metadata.namespace}/{job.metadata.name}"}
    exemplar = {name: value[:_MAX_EXEMPLAR] for name, value in labels.items()}
    if before.phase is not None:
        seconds = _seconds_between(phase_since(job), now)
        metrics.phase_seconds.labels(before.phase).observe(seconds, exemplar)
    if before.phase == "Syncing" and after.phase in ("Queued", "Running"):
        _observe_sync(metrics, observed, now, exemplar)
    if after.phase == "Running":
        _observe_start(metrics, observed, after.attempt, now, exemplar)
    if after.phase in TERMINAL:
        metrics.queue_jobs_finished.labels(*queue, after.phase).inc()


def _observe_sync(
    metrics: Metrics, observed: Observed, now: datetime, exemplar: dict[str, str]
) -> None:
    workspace = observed.job.spec.volumes.workspace
    if workspace is None or not observed.workspace.sync_pods:
        return
    pod = observed.workspace.sync_pods[-1]
    seconds = _seconds_between(pod.metadata.creation_timestamp, now)
    metrics.sync_seconds.labels(workspace.source).observe(seconds, exemplar)
    if (size := read_result(pod).bytes) > 0:
        metrics.sync_bytes.labels(workspace.source).observe(size, exemplar)


def _observe_start(
    metrics: Metrics, observed: Observed, attempt: int, now: datetime, exemplar: dict[str, str]
) -> None:
    job, gang = observed.job, observed.gang
    if job.status.start_time is None:
        created = job.metadata.creation_timestamp
        metrics.job_start_seconds.observe(_seconds_between(created, now), exemplar)
    if gang.child_jobs and job.status.phase == "Queued":
        times = (gang.current_job.metadata.creation_timestamp, head_and_workers.resumption_of(gang))
        since = max((time for time in times if time is not None), default=None)
        label = "later" if attempt else "first"
        metrics.gang_start_seconds.labels(label).observe(_seconds_between(since, now), exemplar)


def _followed_attempts(before: TorchrunJobStatus, after: TorchrunJobStatus) -> list[Attempt]:
    """Return the attempts and rounds that ended now, if another one follows.

    Suspensions do not count.
    """
    recorded = set(map(order_of, before.attempts))
    return [
        attempt
        for attempt in after.attempts
        if order_of(attempt) not in recorded
        and (attempt.reason in RESIZES or attempt.reason not in INTENDED_ENDS)
        and (attempt.round is not None or after.phase not in TERMINAL)
    ]


def _kind(attempt: Attempt) -> str:
    if attempt.round is not None:
        return "in-place"
    if attempt.reason in RESIZES:
        return "resize"
    return "failure" if attempt.counted else "disruption"


def _seconds_between(since: datetime | None, now: datetime) -> float:
    """Return the seconds between two times, at least 0: the clocks of two machines may differ."""
    return max(0.0, (now - since).total_seconds()) if since is not None else 0.0
