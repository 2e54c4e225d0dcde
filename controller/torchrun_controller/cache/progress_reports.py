"""The newest progress report of each job. Lost with the process; the next report restores it."""

import math
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeAlias

from msgspec import Struct

from torchrun_api.status import Progress
from torchrun_controller.reconcile.model.observed import RestartsInPlace

Key: TypeAlias = tuple[str, str]
"""Namespace and name of a TorchrunJob."""

FRESH = timedelta(minutes=1)


class Worker(Struct, frozen=True):
    """A worker of the current attempt: its job, and the UID of the child Job that controls it."""

    job: Key
    child_uid: str


class Report(Struct, frozen=True):
    """The last reports of a job; `child_uid` is the UID of the senders' child Job.

    Node 0 reports restarts, and rank 0, which may run on another node, progress.
    """

    child_uid: str
    received: float  # in seconds of the clock
    progress: Progress | None = None
    restarts: RestartsInPlace = RestartsInPlace()


class Totals(Struct, frozen=True):
    """Sums over the jobs that reported within the last minute."""

    jobs: int
    samples_per_second: float


class Reports:
    """The newest report of each job. Bounded by the existing jobs. `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._newest: dict[Key, Report] = {}

    def put(
        self,
        job: Key,
        child_uid: str,
        progress: Progress | None = None,
        restarts: RestartsInPlace | None = None,
    ) -> None:
        """Replace those parts of the job's report that are given."""
        last = self.of(job, child_uid)
        self._newest[job] = Report(
            child_uid, self._clock(), progress or last.progress, restarts or last.restarts
        )

    def of(self, job: Key, child_uid: str) -> Report:
        """Return the last report from workers of this child Job; an empty one without."""
        report = self._newest.get(job)
        if report is None or report.child_uid != child_uid:
            return Report(child_uid, -math.inf)
        return report

    def newest(self, job: Key) -> Progress | None:
        """Return the last progress of the job, of any attempt."""
        report = self._newest.get(job)
        return report.progress if report is not None else None

    def age(self, job: Key) -> float:
        """Return the seconds since the last report of the job, infinity without one."""
        report = self._newest.get(job)
        return float("inf") if report is None else self._clock() - report.received

    def forget(self, job: Key) -> None:
        """Drop the report of a deleted job."""
        self._newest.pop(job, None)

    def totals(self) -> Totals:
        """Return the sums for metrics, without jobs that stopped reporting."""
        oldest = self._clock() - FRESH.total_seconds()
        fresh_reports = [
            report.progress
            for report in self._newest.values()
            if report.progress is not None and report.received >= oldest
        ]
        return Totals(
            len(fresh_reports),
            sum(progress.samples_per_second or 0.0 for progress in fresh_reports),
        )
