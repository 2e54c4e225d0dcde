"""When the status takes over a progress report of a worker, and what it shows of it."""

import math
from datetime import datetime, timedelta

from msgspec.structs import replace

from torchrun_api.status import Progress

# Least time between two writes of the status for the progress alone.
INTERVAL = timedelta(seconds=10)
RATE_SECONDS = 60.0  # time constant of the average of stepsPerSecond
_DIGITS = 4  # significant digits: kubectl prints the numbers as they stand in the status


def choose_progress(
    shown: Progress | None,
    report: Progress | None,
    now: datetime,
    *,
    gang_start: datetime | None,
    has_ended: bool,
) -> Progress | None:
    """Return the newest report, but at most one per INTERVAL; always the last one at the end.

    `shown` is what the status has, `report` what the gang has sent last.
    gang_start: when the current gang was created. An older `shown` is of another gang.
    """
    if report is None or _shows(shown, report):
        return shown
    if not has_ended and _seconds_left(shown, now) > 0:
        return shown
    rate = _steps_per_second(shown, report, gang_start)
    return replace(_rounded(report), steps_per_second=_round(rate))


def next_report(shown: Progress | None, report: Progress | None, now: datetime) -> float | None:
    """Return the seconds until the status has to take over a report; None if it has it."""
    if report is None or _shows(shown, report):
        return None
    return _seconds_left(shown, now)


def _shows(shown: Progress | None, report: Progress) -> bool:
    """Whether the status has this report."""
    return shown is not None and replace(shown, steps_per_second=None) == _rounded(report)


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
    shown: Progress | None, report: Progress, gang_start: datetime | None
) -> float | None:
    """Return the average rate of the current gang; None before its second report.

    Restarts from the newest two reports if the steps or the clock went back.
    """
    if shown is None or shown.step is None or shown.time is None:
        return None
    if report.step is None or report.time is None:
        return None
    if gang_start is not None and shown.time < gang_start:
        return None
    steps, seconds = report.step - shown.step, (report.time - shown.time).total_seconds()
    if steps < 0 or seconds <= 0:
        return None
    newest, average = steps / seconds, shown.steps_per_second
    if average is None:
        return newest
    weight = math.exp(-seconds / RATE_SECONDS)
    return weight * average + (1 - weight) * newest


def _seconds_left(shown: Progress | None, now: datetime) -> float:
    if shown is None or shown.time is None:
        return 0.0
    age = now - shown.time
    # A time in the future: the clock was set back.
    return (INTERVAL - age).total_seconds() if timedelta() <= age < INTERVAL else 0.0
