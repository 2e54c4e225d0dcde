"""What the pods of a gang say: how many run, why one waits, what failed first."""

from datetime import UTC, datetime

import msgspec

from torchrun_api import names
from torchrun_api.core import ContainerStatus, Pod, StateTerminated
from torchrun_api.job import LastFailure, WorkersStatus
from torchrun_api.meta import Wire

IMAGE_REASONS = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "ErrImageNeverPull",
        "InvalidImageName",
        "ImageInspectError",
        "RegistryUnavailable",
    }
)
# What the pod's own status says beats what its container could say of itself.
POD_VERDICTS = frozenset({"Evicted", "OOMKilled", "DeadlineExceeded", "NodeLost", "Preempting"})
# A rank that was told to stop is never the cause while another has one to tell.
SIGTERM = 15
_LATEST = datetime.max.replace(tzinfo=UTC)


class Why(msgspec.Struct, frozen=True):
    """A reason in CamelCase and a message that a person can act on."""

    reason: str
    message: str


class Verdict(Wire, frozen=True, kw_only=True):
    """The termination message that the launcher writes."""

    rank: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    reason: str = ""
    message: str = ""
    time: datetime | None = None


def count(pods: tuple[Pod, ...], nodes: int) -> WorkersStatus:
    """Workers by state; one without a pod yet counts as pending."""
    phases = [pod.status.phase for pod in pods]
    running, failed, succeeded = (
        phases.count("Running"),
        phases.count("Failed"),
        phases.count("Succeeded"),
    )
    return WorkersStatus(
        pending=max(0, nodes - running - failed - succeeded),
        ready=sum(_ready(pod) for pod in pods),
        running=running,
        failed=failed,
        succeeded=succeeded,
    )


def _ready(pod: Pod) -> bool:
    return any(c.type == "Ready" and c.status == "True" for c in pod.status.conditions)


def scheduled(pods: tuple[Pod, ...]) -> int:
    """How many have a node."""
    return sum(bool(pod.spec.node_name) for pod in pods)


def why_waiting(pod: Pod) -> Why | None:
    """Why a pod does not start, where something is known to be wrong."""
    for condition in pod.status.conditions:
        if condition.type == "PodScheduled" and condition.status == "False":
            return Why("Unschedulable", f"pod {pod.metadata.name}: {condition.message}")
    for container in pod.status.init_container_statuses + pod.status.container_statuses:
        waiting = container.state.waiting
        if waiting is None or waiting.reason in ("", "PodInitializing", "ContainerCreating"):
            continue
        reason = "ImagePullFailed" if waiting.reason in IMAGE_REASONS else waiting.reason
        detail = waiting.message or waiting.reason
        return Why(reason, f"pod {pod.metadata.name}, container {container.name}: {detail}")
    return None


def first_reason(pods: tuple[Pod, ...]) -> Why | None:
    """The first reason that any of the pods gives, in the order of their indexes."""
    found = (why_waiting(pod) for pod in sorted(pods, key=_index) if pod.status.phase == "Pending")
    return next((why for why in found if why is not None), None)


def _index(pod: Pod) -> int:
    index = pod.metadata.labels.completion_index
    return int(index) if index.isdecimal() else 0


def root_cause(pods: tuple[Pod, ...]) -> LastFailure | None:
    """The failure that began it, not the collateral ("Connection closed by peer") on other ranks.

    Verdicts of the pod (OOMKilled, Evicted) beat signals, signals beat exceptions; then the first
    by time. A rank that is killed writes nothing itself: the pod's status is the better witness.
    """
    failures = [_failure(pod) for pod in pods if pod.status.phase == "Failed"]
    return min(failures, key=precedence, default=None)


def precedence(failure: LastFailure) -> tuple[int, datetime]:
    """Order of failures: the smallest is the root cause."""
    if failure.reason in POD_VERDICTS:
        grade = 0
    elif failure.signal == SIGTERM:
        grade = 3
    elif failure.signal:
        grade = 1
    else:
        grade = 2
    return grade, failure.time or _LATEST


def _failure(pod: Pod) -> LastFailure:
    ended = _terminated(pod)
    said = _verdict(ended.message)
    exit_code = ended.exit_code if said.exit_code is None else said.exit_code
    signal = said.signal or ended.signal or (exit_code - 128 if 128 < exit_code < 192 else None)
    if pod.status.reason in POD_VERDICTS:
        reason, message = pod.status.reason, pod.status.message
    elif ended.reason in POD_VERDICTS:
        reason, message = ended.reason, "the container exceeded its memory limit"
    else:
        reason = said.reason or ("Signal" if signal else "ExitCode")
        message = said.message or _last_line(ended.message) or pod.status.message
    return LastFailure(
        node=pod.spec.node_name,
        rank=said.rank,
        exit_code=exit_code,
        signal=signal,
        reason=reason,
        message=f"pod {pod.metadata.name}: {message}" if message else f"pod {pod.metadata.name}",
        time=said.time or ended.finished_at,
    )


def _terminated(pod: Pod) -> StateTerminated:
    """How the training container ended, or the init container that never let it start."""
    statuses: dict[str, ContainerStatus] = {
        status.name: status
        for status in pod.status.init_container_statuses + pod.status.container_statuses
    }
    ends = [
        status.state.terminated
        for name, status in statuses.items()
        if status.state.terminated and status.state.terminated.exit_code
    ]
    trainer = statuses.get(names.TRAINER_CONTAINER)
    if trainer is not None and trainer.state.terminated is not None:
        return trainer.state.terminated
    return ends[0] if ends else StateTerminated()


def _verdict(message: str) -> Verdict:
    """The launcher's words; anything else (no launcher, a cut message) is no verdict."""
    try:
        return msgspec.json.decode(message, type=Verdict)
    except msgspec.DecodeError:
        return Verdict()


def _last_line(message: str) -> str:
    lines = message.strip().splitlines()
    return lines[-1].strip()[:500] if lines else ""
