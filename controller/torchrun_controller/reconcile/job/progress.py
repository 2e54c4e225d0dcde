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
    present: Progress | None,
    reported: Progress | None,
    now: datetime,
    *,
    gang_start: datetime | None,
    ended: bool,
) -> Progress | None:
    """Return the newest report, but at most one per INTERVAL; always the last one at the end.

    gang_start: when the current gang was created. An older `present` is of another gang.
    """
    if reported is None or _shows(present, reported):
        return present
    if not ended and _seconds_left(present, now) > 0:
        return present
    rate = _steps_per_second(present, reported, gang_start)
    return replace(_rounded(reported), steps_per_second=_round(rate))


def next_report(present: Progress | None, reported: Progress | None, now: datetime) -> float | None:
    """Return the seconds until the status has to take over a report; None if it has it."""
    if reported is None or _shows(present, reported):
        return None
    return _seconds_left(present, now)


def _shows(present: Progress | None, reported: Progress) -> bool:
    """Whether the status has this report."""
    return present is not None and replace(present, steps_per_second=None) == _rounded(reported)


def _rounded(reported: Progress) -> Progress:
    """Return the report with rounded numbers. Steps are exact."""
    return replace(
        reported,
        loss=_round(reported.loss),
        samples_per_second=_round(reported.samples_per_second),
    )


def _round(value: float | None) -> float | None:
    if value is None:
        return None
    rounded = float(f"{value:.{_DIGITS}g}")
    return rounded if math.isfinite(rounded) else value  # near the largest float


def _steps_per_second(
    present: Progress | None, reported: Progress, gang_start: datetime | None
) -> float | None:
    """Return the average rate of the current gang; None before its second report.

    Restarts from the newest two reports if the steps or the clock went back.
    """
    if present is None or present.step is None or present.time is None:
        return None
    if reported.step is None or reported.time is None:
        return None
    if gang_start is not None and present.time < gang_start:
        return None
    steps, seconds = reported.step - present.step, (reported.time - present.time).total_seconds()
    if steps < 0 or seconds <= 0:
        return None
    newest, average = steps / seconds, present.steps_per_second
    if average is None:
        return newest
    weight = math.exp(-seconds / RATE_SECONDS)
    return weight * average + (1 - weight) * newest


def _seconds_left(present: Progress | None, now: datetime) -> float:
    if present is None or present.time is None:
        return 0.0
    age = now - present.time
    # A time in the future: the clock was set back.
    return (INTERVAL - age).total_seconds() if timedelta() <= age < INTERVAL else 0.0
