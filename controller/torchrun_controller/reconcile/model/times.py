"""The ends of attempts that the status records, and running time, deadlines and timeouts."""

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import TypeAlias

from msgspec.structs import replace

from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.status import Attempt, TorchrunJobStatus
from torchrun_controller.reconcile.model.conditions import find_condition
from torchrun_controller.reconcile.model.phases import RUNNING_PHASES


def find_end(attempts: Iterable[Attempt], number: int) -> Attempt | None:
    """Return the end of the attempt of this number; None if `attempts` do not record it."""
    return next((end for end in whole_attempts(attempts) if end.number == number), None)


def whole_attempts(attempts: Iterable[Attempt]) -> tuple[Attempt, ...]:
    """Return the ends of whole attempts, without those of rounds."""
    return tuple(end for end in attempts if end.round is None)


Order: TypeAlias = tuple[int, bool, int]


def order_of(attempt: Attempt) -> Order:
    """Return the sort key, which no other end has: rounds come before the end of their attempt."""
    return attempt.number, attempt.round is None, attempt.round or 0


def keep_last(
    recorded_ends: tuple[Attempt, ...], new_ends: tuple[Attempt, ...], most: int
) -> tuple[Attempt, ...]:
    """Return the last ends of attempts and rounds, at most `most`, each as first recorded."""
    by_order = {order_of(end): end for end in (*new_ends, *recorded_ends)}
    return tuple(by_order[order] for order in sorted(by_order))[-most:]


def running_since(status: TorchrunJobStatus) -> datetime | None:
    """Return since when the gang runs; None if it does not run."""
    if status.phase not in RUNNING_PHASES:
        return None
    condition = find_condition(status.conditions, "Running")
    return condition.last_transition_time if condition is not None else None


def end_of_running(status: TorchrunJobStatus, end: Attempt | None) -> datetime | None:
    """Return when the gang stopped running, by its record; None if the status has none."""
    since = running_since(status)
    if since is None or end is None:
        return None
    return since + timedelta(seconds=end.running_seconds)


def seconds_of_gang(status: TorchrunJobStatus, until: datetime) -> float:
    """Return how long all workers of the present gang have run; `until` its end, or now."""
    since = running_since(status)
    seconds = (until - since).total_seconds() if since else 0.0
    return max(seconds, 0.0)


def seconds_run(status: TorchrunJobStatus, until: datetime) -> float:
    """Return the running time of all gangs, without suspensions and waits, in seconds."""
    return status.running_seconds + seconds_of_gang(status, until)


def deadline_left(
    status: TorchrunJobStatus, deadline: timedelta | None, until: datetime
) -> float | None:
    """Return the seconds until the deadline; None without a deadline or while nothing runs."""
    if deadline is None or running_since(status) is None:
        return None
    return deadline.total_seconds() - seconds_run(status, until)


def sync_left(status: TorchrunJobStatus, timeout: timedelta | None, now: datetime) -> float | None:
    """Return the seconds until syncTimeoutSeconds; None without a timeout or outside Syncing.

    The timeout starts again for each attempt, and after a suspension.
    """
    if timeout is None or status.phase != "Syncing":
        return None
    since = status.sync_start_time
    seconds = (now - since).total_seconds() if since else 0.0
    return timeout.total_seconds() - seconds


def sync_start(before: TorchrunJobStatus, phase: str | None, now: datetime) -> datetime | None:
    """Return when the present sync started, for the next status."""
    if phase != "Syncing":
        return None
    return (before.sync_start_time if before.phase == "Syncing" else None) or now


def seconds_left(length: timedelta, since: datetime | None, now: datetime) -> float:
    """Return the seconds left of a wait since a time of another clock, at most `length`.

    A time that is further in the future than `length` is ignored: nothing waits for it.
    """
    age = now - since if since is not None else timedelta()
    if age < -length:
        return 0.0
    return (length - max(age, timedelta())).total_seconds()


def without_future(job: TorchrunJob, now: datetime) -> TorchrunJob:
    """Replace the controller's own times in the status that are in the future by `now`.

    The clock was set back, or that of an earlier leader was ahead. A back-off or timeout that has
    started then takes its own length from now, without the difference of the clocks.
    """
    status = job.status
    new_status = replace(
        status,
        conditions=tuple(
            replace(c, last_transition_time=_past(c.last_transition_time, now))
            for c in status.conditions
        ),
        attempts=tuple(replace(a, end_time=_past(a.end_time, now)) for a in status.attempts),
        sync_start_time=_past(status.sync_start_time, now),
    )
    return job if new_status == status else replace(job, status=new_status)


def without_future_end(job: TorchrunJob, now: datetime) -> TorchrunJob:
    """Replace the completionTime of a finished job by `now` if it is in the future.

    For waits from the end of the job: see `without_future`.
    """
    status = job.status
    completion_time = _past(status.completion_time, now)
    if completion_time == status.completion_time:
        return job
    return replace(job, status=replace(status, completion_time=completion_time))


def since_resumption(job: TorchrunJob, resumed_at: datetime | None, now: datetime) -> TorchrunJob:
    """Let the gang run since its Job was resumed, if no controller has seen the suspension.

    How long it ran before that is unknown, and does not count.
    """
    since = running_since(job.status)
    if since is None or resumed_at is None or not since < resumed_at <= now:
        return job
    conditions = tuple(
        replace(c, last_transition_time=resumed_at) if c.type == "Running" else c
        for c in job.status.conditions
    )
    return replace(job, status=replace(job.status, conditions=conditions))


def _past(time: datetime | None, now: datetime) -> datetime | None:
    return time if time is None or time <= now else now


def soonest(*seconds: float | None) -> float | None:
    """Return the first of the times that are ahead; None for none."""
    return min((s for s in seconds if s is not None and s > 0), default=None)
