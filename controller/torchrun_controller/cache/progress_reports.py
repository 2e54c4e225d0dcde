"""The newest progress report of each job. Lost with the process; the next report restores it."""

import math
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeAlias

from msgspec import Struct

from torchrun_api.kinds.status import Checkpoint, Progress
from torchrun_controller.reconcile.gang.checkpoints import merge
from torchrun_controller.reconcile.model.observed import RestartsInPlace

Key: TypeAlias = tuple[str, str]
"""Namespace and name of a TorchrunJob."""

FRESH = timedelta(minutes=1)


class ReportingWorker(Struct, frozen=True):
    """A worker of a job, and the UID of the child Job of the current attempt that controls it.

    is_leader: of its gang, as the worker of node 0. is_current: False for a worker of an earlier
    attempt that still ends; child_uid is empty then.
    """

    job: Key
    child_uid: str
    is_leader: bool = True
    job_uid: str = ""
    is_current: bool = True


class LatestReport(Struct, frozen=True):
    """The last progress of a job; `child_uid` is the UID of the sender's child Job."""

    child_uid: str
    progress: Progress
    received: float  # in seconds of the clock


class RestartReport(Struct, frozen=True):
    """The last report of a job about restarts in place. Another node may report the progress."""

    child_uid: str
    restarts: RestartsInPlace
    received: float


class CheckpointReport(Struct, frozen=True):
    """The last checkpoints of a job, which attempts share; `job_uid` is the UID of the job."""

    job_uid: str
    checkpoints: tuple[Checkpoint, ...]
    received: float


class Totals(Struct, frozen=True):
    """Sums over the jobs that reported within the last minute."""

    jobs: int
    samples_per_second: float


class Reports:
    """The newest report of each job. Bounded by the existing jobs. `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._newest: dict[Key, LatestReport] = {}
        self._restarts: dict[Key, RestartReport] = {}
        self._checkpoints: dict[Key, CheckpointReport] = {}

    def put(self, job: Key, child_uid: str, progress: Progress) -> None:
        """Replace the progress of the job."""
        self._newest[job] = LatestReport(child_uid, progress, self._clock())

    def put_restarts(self, job: Key, child_uid: str, restarts: RestartsInPlace) -> None:
        """Replace the restarts in place of the job."""
        self._restarts[job] = RestartReport(child_uid, restarts, self._clock())

    def put_checkpoints(self, job: Key, job_uid: str, checkpoints: tuple[Checkpoint, ...]) -> None:
        """Add checkpoints of the job; only the newest are kept."""
        newest = merge(self.checkpoints_of(job, job_uid), checkpoints)
        self._checkpoints[job] = CheckpointReport(job_uid, newest, self._clock())

    def checkpoints_of(self, job: Key, job_uid: str) -> tuple[Checkpoint, ...]:
        """Return the newest checkpoints that node 0 of any attempt reported, the newest first."""
        report = self._checkpoints.get(job)
        return report.checkpoints if report is not None and report.job_uid == job_uid else ()

    def of(self, job: Key, child_uid: str) -> Progress | None:
        """Return the last progress that workers of this child Job reported."""
        report = self._newest.get(job)
        return report.progress if report is not None and report.child_uid == child_uid else None

    def restarts_of(self, job: Key, child_uid: str) -> RestartsInPlace:
        """Return the restarts in place that node 0 of this child Job reported last."""
        report = self._restarts.get(job)
        if report is None or report.child_uid != child_uid:
            return RestartsInPlace()
        return report.restarts

    def has_any(self, job: Key, child_uid: str) -> bool:
        """Return whether workers of this child Job have reported."""
        reports = (self._newest.get(job), self._restarts.get(job))
        return any(report is not None and report.child_uid == child_uid for report in reports)

    def newest(self, job: Key) -> Progress | None:
        """Return the last progress of the job, of any attempt."""
        report = self._newest.get(job)
        return report.progress if report is not None else None

    def age(self, job: Key) -> float:
        """Return the seconds since the last report of the job, infinity without one."""
        reports = (self._newest.get(job), self._restarts.get(job), self._checkpoints.get(job))
        times = [report.received for report in reports if report is not None]
        return self._clock() - max(times) if times else math.inf

    def forget(self, job: Key) -> None:
        """Drop the reports of a deleted job."""
        self._newest.pop(job, None)
        self._restarts.pop(job, None)
        self._checkpoints.pop(job, None)

    def totals(self) -> Totals:
        """Return the sums for metrics, without jobs that stopped reporting."""
        oldest = self._clock() - FRESH.total_seconds()
        fresh_reports = [r.progress for r in self._newest.values() if r.received >= oldest]
        return Totals(
            len(fresh_reports),
            sum(progress.samples_per_second or 0.0 for progress in fresh_reports),
        )
