"""The job's word on failures and ends, over its queue's, over the defaults."""

from datetime import timedelta
from typing import TypeVar

from msgspec import Struct

from torchrun_api.job import TorchrunJob
from torchrun_api.queue import TorchrunQueue
from torchrun_api.reliability import FailureRule, Reliability

DEFAULT_MAX_RESTARTS = 3
DEFAULT_GRACE_SECONDS = 30

T = TypeVar("T")


class Policy(Struct, frozen=True, kw_only=True):
    """What the job allows; None: without end."""

    max_restarts: int = DEFAULT_MAX_RESTARTS
    never_restart: bool = False
    rules: tuple[FailureRule, ...] = ()
    time_to_live: timedelta | None = None
    deadline: timedelta | None = None
    deadline_set_by: str = ""
    sync_timeout: timedelta | None = None
    grace_seconds: int = DEFAULT_GRACE_SECONDS
    hang_seconds: int | None = None
    allow_unfenced_restart: bool = False


def policy_of(job: TorchrunJob, queue: TorchrunQueue | None) -> Policy:
    """Merge field by field. Without its queue a job goes by its own word and the defaults."""
    mine = job.spec.reliability
    base = queue.spec.reliability if queue is not None else Reliability()

    deadline, set_by = _deadline(
        _pick(mine.active_deadline_seconds, base.active_deadline_seconds, -1), queue
    )
    return Policy(
        max_restarts=_pick(mine.max_restarts, base.max_restarts, DEFAULT_MAX_RESTARTS),
        never_restart=_pick(mine.restart_policy, base.restart_policy, "OnFailure") == "Never",
        rules=_pick(mine.rules, base.rules, ()),
        time_to_live=_seconds(
            _pick(mine.ttl_seconds_after_finished, base.ttl_seconds_after_finished, -1)
        ),
        deadline=deadline,
        deadline_set_by=set_by,
        sync_timeout=_seconds(_pick(mine.sync_timeout_seconds, base.sync_timeout_seconds, -1)),
        allow_unfenced_restart=_pick(
            mine.allow_unfenced_restart, base.allow_unfenced_restart, False
        ),
        grace_seconds=_pick(
            mine.termination_grace_period_seconds,
            base.termination_grace_period_seconds,
            DEFAULT_GRACE_SECONDS,
        ),
        hang_seconds=_pick(mine.hang_timeout_seconds, base.hang_timeout_seconds, None),
    )


def _pick(own: T | None, queues: T | None, default: T) -> T:
    chosen = own if own is not None else queues
    return default if chosen is None else chosen


def _deadline(asked: int, queue: TorchrunQueue | None) -> tuple[timedelta | None, str]:
    """The least of what is asked for and what the queue's administrator allows, and whose it is."""
    most = queue.spec.limits.max_run_seconds if queue is not None else None
    if most is not None and not 0 <= asked <= most:
        return timedelta(seconds=most), "limits.maxRunSeconds of the queue"
    return _seconds(asked), "activeDeadlineSeconds"


def _seconds(value: int) -> timedelta | None:
    return timedelta(seconds=value) if value >= 0 else None
