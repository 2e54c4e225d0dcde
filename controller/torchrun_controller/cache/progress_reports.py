"""The newest report of each job. Lost with the process, and back with the next report."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeAlias

from msgspec import Struct

from torchrun_api.status import Progress

Key: TypeAlias = tuple[str, str]
"""Namespace and name of a TorchrunJob."""

FRESH = timedelta(minutes=1)


class Worker(Struct, frozen=True):
    """A worker of a job's present attempt: its job, and the child Job that controls it."""

    job: Key
    child_uid: str


class Report(Struct, frozen=True):
    """child_uid: of the child Job whose worker said so. received: by the clock, in seconds."""

    child_uid: str
    progress: Progress
    received: float


class Totals(Struct, frozen=True):
    """What the jobs that reported within the last minute make together."""

    jobs: int
    samples_per_second: float


class Reports:
    """Bounded by the number of TorchrunJobs: a report of any other job is never put here."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._newest: dict[Key, Report] = {}

    def put(self, job: Key, child_uid: str, progress: Progress) -> None:
        """Take a report in the place of the one before it."""
        self._newest[job] = Report(child_uid, progress, self._clock())

    def of(self, job: Key, child_uid: str) -> Progress | None:
        """What workers of this child Job said last."""
        report = self._newest.get(job)
        return report.progress if report is not None and report.child_uid == child_uid else None

    def age(self, job: Key) -> float:
        """Seconds since the job's last report; without end where there is none."""
        report = self._newest.get(job)
        return float("inf") if report is None else self._clock() - report.received

    def forget(self, job: Key) -> None:
        """The job is gone."""
        self._newest.pop(job, None)

    def totals(self) -> Totals:
        """For metrics; jobs that fell silent do not count."""
        since = self._clock() - FRESH.total_seconds()
        fresh = [r.progress for r in self._newest.values() if r.received >= since]
        return Totals(len(fresh), sum(progress.samples_per_second or 0.0 for progress in fresh))
