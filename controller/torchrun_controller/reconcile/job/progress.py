"""When the status takes over a progress report of a worker."""

from datetime import datetime, timedelta

from torchrun_api.status import Progress

# Least time between two writes of the status for the progress alone.
INTERVAL = timedelta(seconds=10)


def choose_progress(
    present: Progress | None, reported: Progress | None, now: datetime, *, ended: bool
) -> Progress | None:
    """Return the newest report, but at most one per INTERVAL; always the last one at the end."""
    if reported is None:
        return present
    return present if not ended and _seconds_left(present, now) > 0 else reported


def next_report(present: Progress | None, reported: Progress | None, now: datetime) -> float | None:
    """Return the seconds until the status has to take over a report; None if it has it."""
    if reported in (None, present):
        return None
    return _seconds_left(present, now)


def _seconds_left(present: Progress | None, now: datetime) -> float:
    if present is None or present.time is None:
        return 0.0
    age = now - present.time
    # A time in the future: the clock was set back.
    return (INTERVAL - age).total_seconds() if timedelta() <= age < INTERVAL else 0.0
