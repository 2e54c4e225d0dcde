"""When a progress report of a worker is copied into the status, what of it, and the time left."""

import math
from datetime import datetime, timedelta

from msgspec.structs import replace

from torchrun_api.kinds.status import Progress

# Least time between two writes of the status for the progress alone.
INTERVAL = timedelta(seconds=10)
RATE_SECONDS = 60.0  # time constant of the average of stepsPerSecond
_LONGEST = 2**31 - 1  # seconds; the field has 32 bits in Kubeflow Trainer (KEP-2779)
_DIGITS = 4  # significant digits: kubectl prints the numbers of the status unchanged


def choose_progress(
    last_progress: Progress | None,
    report: Progress | None,
    now: datetime,
    *,
    ranks_start: datetime | None,
    has_ended: bool,
) -> Progress | None:
    """Return the newest report, but at most one per INTERVAL; always the last one at the end.

    `last_progress` is that of the status. ranks_start: when the ranks that run started, at the
    earliest. An older `last_progress` is of other ranks.
    """
    if report is None or _shows(last_progress, report):
        return last_progress
    if not has_ended and _seconds_left(last_progress, now) > 0:
        return last_progress
    rate = _steps_per_second(last_progress, report, ranks_start)
    return replace(_rounded(report), steps_per_second=_round(rate))


def estimate_remaining(progress: Progress | None, ranks_start: datetime | None) -> int | None:
    """Return the seconds from the time of the report to the last step; None if unknown.

    It depends on a report in the status alone, so it causes no write of the status. ranks_start: as
    for `choose_progress`.
    """
    if progress is None or progress.step is None or not progress.total_steps:
        return None
    if not progress.steps_per_second or _is_older(progress, ranks_start):
        return None
    seconds = (progress.total_steps - progress.step) / progress.steps_per_second
    return round(min(max(seconds, 0.0), _LONGEST))


def next_report(
    last_progress: Progress | None, report: Progress | None, now: datetime
) -> float | None:
    """Return the seconds until the status needs a report; None if it has the last one."""
    if report is None or _shows(last_progress, report):
        return None
    return _seconds_left(last_progress, now)


def _shows(last_progress: Progress | None, report: Progress) -> bool:
    """Whether the status has this report."""
    return last_progress is not None and replace(last_progress, steps_per_second=None) == _rounded(
        report
    )


def _rounded(report: Progress) -> Progress:
    """Return the report with rounded numbers. Steps are exact."""
    return replace(
        report,
        loss=_round(report.loss),
        samples_per_second=_round(report.samples_per_second),
    )


def _round(value: float | None) -> float | None:
    if value is None:
        return None
    rounded_value = float(f"{value:.{_DIGITS}g}")
    return rounded_value if math.isfinite(rounded_value) else value  # near the largest float


def _steps_per_second(
    last_progress: Progress | None, report: Progress, ranks_start: datetime | None
) -> float | None:
    """Return the average rate of the ranks that run; None before their second report.

    Restarts from the newest two reports if the steps or the clock went back.
    """
    if last_progress is None or last_progress.step is None or last_progress.time is None:
        return None
    if report.step is None or report.time is None:
        return None
    if _is_older(last_progress, ranks_start):
        return None
    steps, seconds = (
        report.step - last_progress.step,
        (report.time - last_progress.time).total_seconds(),
    )
    if steps < 0 or seconds <= 0:
        return None
    newest, average = steps / seconds, last_progress.steps_per_second
    if average is None:
        return newest
    weight = math.exp(-seconds / RATE_SECONDS)
    return weight * average + (1 - weight) * newest


def _is_older(progress: Progress, ranks_start: datetime | None) -> bool:
    """Whether the report may be of ranks that have ended."""
    return progress.time is None or (ranks_start is not None and progress.time < ranks_start)


def _seconds_left(last_progress: Progress | None, now: datetime) -> float:
    if last_progress is None or last_progress.time is None:
        return 0.0
    age = now - last_progress.time
    # A time in the future: the clock was set back.
    return (INTERVAL - age).total_seconds() if timedelta() <= age < INTERVAL else 0.0
