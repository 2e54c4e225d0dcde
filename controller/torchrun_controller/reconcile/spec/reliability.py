"""The reliability settings of a job, over those of its queue, over the defaults."""

from datetime import timedelta
from typing import TypeVar

from msgspec import Struct

from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.queue import TorchrunQueue
from torchrun_api.kinds.reliability import FailureRule, QueuePolicy, Reliability
from torchrun_controller.reconcile.spec import pod_template

DEFAULT_MAX_RESTARTS = 3
DEFAULT_IDLE_ATTEMPTS = 3
DEFAULT_GRACE_SECONDS = 30

T = TypeVar("T")


class ResolvedReliability(Struct, frozen=True, kw_only=True):
    """The merged settings; None is unlimited.

    `idle_attempts` is maxAttemptsWithoutProgress; 0 is unlimited.
    """

    max_restarts: int = DEFAULT_MAX_RESTARTS
    idle_attempts: int = DEFAULT_IDLE_ATTEMPTS
    never_restart: bool = False
    restarts_in_place: bool = False
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
    """Merge field by field: the job's value, then the queue's, then the default.

    The queue's values are those from the start of the job, see `queue_policy`; before the start,
    the present ones. Grace period, hang timeout and the scope of restarts are part of the pods:
    each gang has those of its creation. allowUnfencedRestart applies at once, since it is a way out
    for the user.
    """
    override = job.spec.reliability
    policy = job.status.queue_policy
    policy = queue_policy(queue) if policy is None else policy
    base = queue.spec.reliability if queue is not None else Reliability()

    deadline, set_by = _deadline(
        _pick(override.active_deadline_seconds, policy.active_deadline_seconds, -1),
        policy.max_run_seconds,
    )
    return ResolvedReliability(
        max_restarts=_pick(override.max_restarts, policy.max_restarts, DEFAULT_MAX_RESTARTS),
        idle_attempts=_pick(
            override.max_attempts_without_progress,
            policy.max_attempts_without_progress,
            DEFAULT_IDLE_ATTEMPTS,
        ),
        never_restart=_pick(override.restart_policy, policy.restart_policy, "OnFailure") == "Never",
        restarts_in_place=_pick(override.restart_scope, base.restart_scope, "InPlace") == "InPlace",
        rules=_pick(override.rules, policy.rules, ()),
        time_to_live=_seconds(
            _pick(override.ttl_seconds_after_finished, policy.ttl_seconds_after_finished, -1)
        ),
        deadline=deadline,
        deadline_set_by=set_by,
        sync_timeout=_seconds(
            _pick(override.sync_timeout_seconds, policy.sync_timeout_seconds, -1)
        ),
        allow_unfenced_restart=_pick(
            override.allow_unfenced_restart, base.allow_unfenced_restart, False
        ),
        grace_seconds=_pick(
            _longer(override.termination_grace_period_seconds, pod_template.grace_of_job(job)),
            _longer(
                base.termination_grace_period_seconds,
                pod_template.grace_of(queue.spec.pod_template) if queue is not None else None,
            ),
            DEFAULT_GRACE_SECONDS,
        ),
        max_nodes=policy.max_nodes_per_job,
        hang_seconds=_pick(override.hang_timeout_seconds, base.hang_timeout_seconds, None),
    )


def queue_policy(queue: TorchrunQueue | None) -> QueuePolicy:
    """Return the settings on ends and restarts, which stay fixed once a job has started."""
    if queue is None:
        return QueuePolicy()
    reliability, limits = queue.spec.reliability, queue.spec.limits
    return QueuePolicy(
        max_restarts=reliability.max_restarts,
        max_attempts_without_progress=reliability.max_attempts_without_progress,
        restart_policy=reliability.restart_policy,
        rules=reliability.rules,
        ttl_seconds_after_finished=reliability.ttl_seconds_after_finished,
        active_deadline_seconds=reliability.active_deadline_seconds,
        sync_timeout_seconds=reliability.sync_timeout_seconds,
        max_run_seconds=limits.max_run_seconds,
        max_nodes_per_job=limits.max_nodes_per_job,
    )


def _pick(override: T | None, base: T | None, default: T) -> T:
    value = override if override is not None else base
    return default if value is None else value


def _longer(first: int | None, second: int | None) -> int | None:
    """Return the longer grace period of one object: a checkpoint that is cut off is lost."""
    return max((seconds for seconds in (first, second) if seconds is not None), default=None)


def _deadline(seconds: int, limit: int | None) -> tuple[timedelta | None, str]:
    """Return the deadline, at most the limit of the queue, and the field that sets it."""
    if limit is not None and not 0 <= seconds <= limit:
        return timedelta(seconds=limit), "limits.maxRunSeconds of the queue"
    return _seconds(seconds), "activeDeadlineSeconds"


def _seconds(value: int) -> timedelta | None:
    return timedelta(seconds=value) if value >= 0 else None
