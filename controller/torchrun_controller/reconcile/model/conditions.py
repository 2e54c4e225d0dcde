"""Reasons that users read, and metav1 conditions, merged by type.

The time of a condition is that of the last change of its status.
"""

from collections.abc import Iterable
from datetime import datetime
from typing import Protocol, TypeVar

from msgspec import Struct

from torchrun_api.kinds.meta import Condition, ConditionStatus

# The API limits the message of a condition to 32,768 characters; a column or an event holds less.
LONGEST_MESSAGE = 1024
# The condition of a job that the coordinator writes, with a field manager of its own.
ADMITTED = "Admitted"

# Reasons of a waiting job that end only if a user or an administrator acts. The alert
# TorchrunJobsBlocked has the same ones. Other waits end by themselves, as for quota or machines, or
# have an alert of their own, as WaitingForFence.
_SPEC_AND_QUEUE = (
    *("QueueNotFound", "QueueTerminating", "InvalidSpec", "NameConflict", "Rejected"),
    *("GangSchedulerMissing", "DependencyNotFound", "OrphanedWorkers"),
    "StartTimeout",
)
_PODS = (
    *("PodSecurity", "PodsRefused", "SchedulerError", "ImagePullFailed", "VolumeNotMounted"),
    *("ProvisioningFailed", "NoStorageClass", "ClaimNotFound"),
    # The kubelet's reasons.
    *("CreateContainerConfigError", "CreateContainerError", "RunContainerError"),
)
_WORKSPACE = (
    *("SecretNotFound", "SecretInvalid", "AccessDenied", "HostKeyMismatch", "CertificateInvalid"),
    *("SourceNotFound", "InvalidSource", "InvalidSetting", "ForbiddenAddress", "Redirected"),
    *("WrongRegion", "ClockSkew", "GitMissing", "InvalidFile", "EmptyWorkspace", "InvalidArchive"),
    *("CompressionRatio", "WorkspaceFull", "WorkspaceTooLarge", "WorkspaceNotWritable"),
    "SetupFailed",
)
BLOCKED_REASONS = frozenset((*_SPEC_AND_QUEUE, *_PODS, *_WORKSPACE))


class Reason(Struct, frozen=True):
    """A reason in CamelCase and a message that a user can act on."""

    reason: str
    message: str


class ConditionUpdate(Struct, frozen=True):
    """A condition without its times."""

    type: str
    status: ConditionStatus
    why: Reason


class Typed(Protocol):
    """Any condition: of jobs, pods or nodes."""

    @property
    def type(self) -> str: ...  # noqa: D102
    @property
    def status(self) -> str: ...  # noqa: D102


C = TypeVar("C", bound=Typed)


def find_condition(conditions: Iterable[C], kind: str) -> C | None:
    """Return the condition of this type; there is at most one."""
    return next((condition for condition in conditions if condition.type == kind), None)


def find_true(conditions: Iterable[C], kind: str) -> C | None:
    """Return the condition of this type if it is True."""
    condition = find_condition(conditions, kind)
    return condition if condition is not None and condition.status == "True" else None


def update(
    conditions: Iterable[Condition],
    updates: Iterable[ConditionUpdate],
    generation: int,
    now: datetime,
) -> tuple[Condition, ...]:
    """Return the updates as conditions. A condition with an unchanged status keeps its time."""
    by_type = {condition.type: condition for condition in conditions}
    return tuple(_condition(by_type.get(u.type), u, generation, now) for u in updates)


def _condition(
    old_condition: Condition | None, change: ConditionUpdate, generation: int, now: datetime
) -> Condition:
    since: datetime | None = now
    if old_condition is not None and old_condition.status == change.status:
        since = old_condition.last_transition_time
    return Condition(
        type=change.type,
        status=change.status,
        observed_generation=generation,
        last_transition_time=since,
        reason=change.why.reason,
        message=change.why.message[:LONGEST_MESSAGE],
    )


def linked(why: Reason, docs_url: str) -> Reason:
    """Return the reason with a link to its explanation, if somebody has to act.

    `docs_url` is the site that `make docs` builds, whose anchors docs/conf.py sets; "" for none.
    """
    if not docs_url or why.reason not in BLOCKED_REASONS:
        return why
    page = f"{docs_url}/docs/troubleshooting.html#reason-{why.reason.lower()}"
    return Reason(why.reason, f"{why.message} {page}")
