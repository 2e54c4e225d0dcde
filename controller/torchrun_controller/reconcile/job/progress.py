"""When a progress report of a worker comes into the status."""

from datetime import datetime, timedelta

from torchrun_api.status import Progress
from torchrun_controller.reconcile.model.observed import Observed

# At most one write of the status in so long for the progress alone.
INTERVAL = timedelta(seconds=10)


def shown(observed: Observed, now: datetime, *, ended: bool) -> Progress | None:
    """What the status says: the newest report, but no new one too soon; the last one at the end."""
    present, reported = observed.job.status.progress, observed.gang.progress
    if reported is None:
        return present
    return present if not ended and _left(present, now) > 0 else reported


def left(observed: Observed, progress: Progress | None, now: datetime) -> float | None:
    """Seconds until a report that the status does not show is due."""
    if observed.gang.progress in (None, progress):
        return None
    return _left(progress, now)


def _left(present: Progress | None, now: datetime) -> float:
    if present is None or present.time is None:
        return 0.0
    age = now - present.time
    # Of the future: the clock was set back.
    return (INTERVAL - age).total_seconds() if timedelta() <= age < INTERVAL else 0.0
