"""The job's word on failures and ends, over its queue's, over the defaults."""

from datetime import timedelta
from typing import TypeVar

from msgspec import Struct

from torchrun_api.job import TorchrunJob
from torchrun_api.queue import TorchrunQueue
from torchrun_api.reliability import FailureRule, QueuePolicy, Reliability
from torchrun_controller.reconcile.spec import pod_template

DEFAULT_MAX_RESTARTS = 3
DEFAULT_GRACE_SECONDS = 30

T = TypeVar("T")


class ResolvedReliability(Struct, frozen=True, kw_only=True):
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
    max_nodes: int | None = None


def resolve_reliability(job: TorchrunJob, queue: TorchrunQueue | None) -> ResolvedReliability:
    """Merge field by field: the job's word, then the queue's, then the defaults.

    The queue's is what it said when the job started, see `lent_by`; before that, what it says now.
    Grace period and hang timeout are part of the pods, and each gang takes those of its creation.
    A permission to restart beside lost nodes is a way out, and holds at once.
    """
    mine = job.spec.reliability
    lent = job.status.queue_policy
    lent = lent_by(queue) if lent is None else lent
    base = queue.spec.reliability if queue is not None else Reliability()

    deadline, set_by = _deadline(
        _pick(mine.active_deadline_seconds, lent.active_deadline_seconds, -1),
        lent.max_run_seconds,
    )
    return ResolvedReliability(
        max_restarts=_pick(mine.max_restarts, lent.max_restarts, DEFAULT_MAX_RESTARTS),
        never_restart=_pick(mine.restart_policy, lent.restart_policy, "OnFailure") == "Never",
        rules=_pick(mine.rules, lent.rules, ()),
        time_to_live=_seconds(
            _pick(mine.ttl_seconds_after_finished, lent.ttl_seconds_after_finished, -1)
        ),
        deadline=deadline,
        deadline_set_by=set_by,
        sync_timeout=_seconds(_pick(mine.sync_timeout_seconds, lent.sync_timeout_seconds, -1)),
        allow_unfenced_restart=_pick(
            mine.allow_unfenced_restart, base.allow_unfenced_restart, False
        ),
        grace_seconds=_pick(
            _longer(mine.termination_grace_period_seconds, pod_template.grace_of_job(job)),
            _longer(
                base.termination_grace_period_seconds,
                pod_template.grace_of(queue.spec.pod_template) if queue is not None else None,
            ),
            DEFAULT_GRACE_SECONDS,
        ),
        max_nodes=lent.max_nodes_per_job,
        hang_seconds=_pick(mine.hang_timeout_seconds, base.hang_timeout_seconds, None),
    )


def lent_by(queue: TorchrunQueue | None) -> QueuePolicy:
    """What decides over the ends and the repetition of a job, to be kept once it has started."""
    if queue is None:
        return QueuePolicy()
    reliability, limits = queue.spec.reliability, queue.spec.limits
    return QueuePolicy(
        max_restarts=reliability.max_restarts,
        restart_policy=reliability.restart_policy,
        rules=reliability.rules,
        ttl_seconds_after_finished=reliability.ttl_seconds_after_finished,
        active_deadline_seconds=reliability.active_deadline_seconds,
        sync_timeout_seconds=reliability.sync_timeout_seconds,
        max_run_seconds=limits.max_run_seconds,
        max_nodes_per_job=limits.max_nodes_per_job,
    )


def unreachable(rules: tuple[FailureRule, ...]) -> int | None:
    """Index of the first rule that can never match, because earlier ones take all that it names."""
    codes: set[int] = set()
    signals: set[int] = set()
    conditions: set[str] = set()
    for index, rule in enumerate(rules):
        new = (
            set(rule.exit_codes) - codes
            or set(rule.signals) - signals
            or set(rule.pod_conditions) - conditions
        )
        if not new:
            return index
        codes |= set(rule.exit_codes)
        signals |= set(rule.signals)
        conditions |= set(rule.pod_conditions)
    return None


def _pick(own: T | None, queues: T | None, default: T) -> T:
    chosen = own if own is not None else queues
    return default if chosen is None else chosen


def _longer(one: int | None, other: int | None) -> int | None:
    """Of two grace periods of one object: a checkpoint that is cut off is lost."""
    return max((seconds for seconds in (one, other) if seconds is not None), default=None)


def _deadline(asked: int, most: int | None) -> tuple[timedelta | None, str]:
    """The least of what is asked for and what the queue's administrator allows, and whose it is."""
    if most is not None and not 0 <= asked <= most:
        return timedelta(seconds=most), "limits.maxRunSeconds of the queue"
    return _seconds(asked), "activeDeadlineSeconds"


def _seconds(value: int) -> timedelta | None:
    return timedelta(seconds=value) if value >= 0 else None
