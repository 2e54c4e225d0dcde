"""What is computed from the times that the status holds: running time, deadlines, what is left."""

from datetime import datetime, timedelta

from msgspec.structs import replace

from torchrun_api.status import TorchrunJobStatus
from torchrun_controller.reconcile.model.conditions import find_condition
from torchrun_controller.reconcile.model.observed import Observed


def running_since(status: TorchrunJobStatus) -> datetime | None:
    """Since when the gang runs, where it does."""
    if status.phase != "Running":
        return None
    running = find_condition(status.conditions, "Running")
    return running.last_transition_time if running is not None else None


def seconds_of_gang(status: TorchrunJobStatus, now: datetime) -> float:
    """For how long all workers of the present gang have run by now."""
    since = running_since(status)
    passed = (now - since).total_seconds() if since else 0.0
    return max(passed, 0.0)


def seconds_run(status: TorchrunJobStatus, now: datetime) -> float:
    """Running time of all gangs; pauses and waits are not counted, and no clock that goes back."""
    return status.running_seconds + seconds_of_gang(status, now)


def deadline_left(
    status: TorchrunJobStatus, deadline: timedelta | None, now: datetime
) -> float | None:
    """Seconds of running time that are left; None without a deadline or while nothing runs."""
    if deadline is None or running_since(status) is None:
        return None
    return deadline.total_seconds() - seconds_run(status, now)


def sync_left(status: TorchrunJobStatus, timeout: timedelta | None, now: datetime) -> float | None:
    """Seconds that are left for the workspace; None without a limit or outside Syncing.

    Each preparation has the whole time: that of the first gang, that of a later one, and one that
    begins again after a pause.
    """
    if timeout is None or status.phase != "Syncing":
        return None
    since = status.sync_start_time
    passed = (now - since).total_seconds() if since else 0.0
    return timeout.total_seconds() - passed


def sync_start(before: TorchrunJobStatus, phase: str | None, now: datetime) -> datetime | None:
    """When the preparation of the workspace began that is under way in the next status."""
    if phase != "Syncing":
        return None
    return (before.sync_start_time if before.phase == "Syncing" else None) or now


def seconds_left(length: timedelta, since: datetime | None, now: datetime) -> float:
    """What is left of a wait that began at a time of another clock; it is at most `length`.

    A time that lies further ahead than the wait is long tells nothing, and nothing waits for it.
    """
    passed = now - since if since is not None else timedelta()
    if passed < -length:
        return 0.0
    return (length - max(passed, timedelta())).total_seconds()


def without_future(observed: Observed, now: datetime) -> Observed:
    """The same with no time of the controller's own in the status ahead of now.

    The clock was set back, or an earlier leader's was ahead. Such a time becomes now, and the next
    status has it so: a back-off or a timeout that has begun takes its own length from here, and not
    the difference of the clocks as well.
    """
    job, status = observed.job, observed.job.status
    present = replace(
        status,
        conditions=tuple(
            replace(c, last_transition_time=_past(c.last_transition_time, now))
            for c in status.conditions
        ),
        attempts=tuple(replace(a, end_time=_past(a.end_time, now)) for a in status.attempts),
        sync_start_time=_past(status.sync_start_time, now),
    )
    return observed if present == status else replace(observed, job=replace(job, status=present))


def _past(time: datetime | None, now: datetime) -> datetime | None:
    return time if time is None or time <= now else now
