"""When a progress report of a worker is copied into the status, and what of it."""

import math
from datetime import datetime, timedelta

from msgspec.structs import replace

from torchrun_api.kinds.status import Progress

# Least time between two writes of the status for the progress alone.
INTERVAL = timedelta(seconds=10)
RATE_SECONDS = 60.0  # time constant of the average of stepsPerSecond
_DIGITS = 4  # significant digits: kubectl prints the numbers of the status unchanged


def choose_progress(
    last_progress: Progress | None,
    report: Progress | None,
    now: datetime,
    *,
    gang_start: datetime | None,
    has_ended: bool,
) -> Progress | None:
    """Return the newest report, but at most one per INTERVAL; always the last one at the end.

    `last_progress` is that of the status. gang_start: when the current gang was created. An older
    `last_progress` is of another gang.
    """
    if report is None or _shows(last_progress, report):
        return last_progress
    if not has_ended and _seconds_left(last_progress, now) > 0:
        return last_progress
    rate = _steps_per_second(last_progress, report, gang_start)
    return replace(_rounded(report), steps_per_second=_round(rate))


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
    last_progress: Progress | None, report: Progress, gang_start: datetime | None
) -> float | None:
    """Return the average rate of the current gang; None before its second report.

    Restarts from the newest two reports if the steps or the clock went back.
    """
    if last_progress is None or last_progress.step is None or last_progress.time is None:
        return None
    if report.step is None or report.time is None:
        return None
    if gang_start is not None and last_progress.time < gang_start:
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


def _seconds_left(last_progress: Progress | None, now: datetime) -> float:
    if last_progress is None or last_progress.time is None:
        return 0.0
    age = now - last_progress.time
    # A time in the future: the clock was set back.
    return (INTERVAL - age).total_seconds() if timedelta() <= age < INTERVAL else 0.0
