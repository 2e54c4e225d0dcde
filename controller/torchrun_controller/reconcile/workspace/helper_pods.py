"""The state machine that the sync pod and the setup pod share.

A helper pod runs once and leaves a result. A pod that failed is followed by another one, after a
delay that grows, unless the failure is permanent. A pod that runs for an outdated input is
replaced. A pod whose machine is lost is replaced as well, if another pod may
run at the same time.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from enum import Enum
from typing import Annotated, ClassVar, Protocol

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from torchrun_api import names
from torchrun_api.kinds.core import Node, Pod
from torchrun_api.kinds.meta import Wire
from torchrun_controller.reconcile.model.conditions import Reason, find_condition
from torchrun_controller.reconcile.model.messages import sentence
from torchrun_controller.reconcile.model.observed import ReasonString, decode_json
from torchrun_controller.reconcile.model.plan import Apply, Delete
from torchrun_controller.reconcile.model.times import seconds_left
from torchrun_controller.reconcile.pods.lifecycle import alive, delete_pod
from torchrun_controller.reconcile.pods.nodes import NodeLoss, find_loss
from torchrun_controller.reconcile.spec.resolve import WorkspaceDownload

FIRST_RETRY = timedelta(seconds=10)
LONGEST_RETRY = timedelta(minutes=5)
# Reasons of the kubelet that add nothing to the exit code.
GENERIC_REASONS = frozenset({"Error", "Completed"})


class SyncMessage(Wire, frozen=True, kw_only=True):
    """The termination message of the pod's program: its result, or the reason of its failure."""

    commit: str = ""
    sha256: str = ""
    manifest: str = ""
    revision: Annotated[int, Meta(ge=0, lt=10**15)] = 0
    bytes: int = 0
    reason: ReasonString = ""
    message: str = ""
    permanent: bool = False


class ContainerEnd(msgspec.Struct, frozen=True):
    """When a container ended, None if unknown, and its termination message."""

    time: datetime | None
    message: SyncMessage


class SyncState(Enum):
    """How far the workspace is."""

    READY = "Ready"
    SYNCING = "Syncing"
    REFUSED = "Refused"


class WorkspaceStep(msgspec.Struct, frozen=True, kw_only=True):
    """How far the workspace is, and what to create or delete now.

    `commit` is the commit of a ready workspace, where its sync pod reported one. `content`
    identifies the content, "" where nothing does. `failed`: a pod failed. `late_after` are the
    seconds until a gang that restarts no longer waits for the newer code; None where it waits.
    """

    state: SyncState
    why: Reason
    commit: str = ""
    content: str = ""
    served: WorkspaceDownload | None = None
    failed: bool = False
    late_after: float | None = None
    applies: tuple[Apply, ...] = ()
    deletes: tuple[Delete, ...] = ()
    status_before_deletes: bool = False  # see Plan
    requeue_after: float | None = None


class PodFailure(msgspec.Struct, frozen=True):
    """Why a pod failed. `remedy` is what the user has to do, "" where a retry may succeed."""

    reason: str
    message: str
    remedy: str = ""


class HelperPods(Protocol):
    """What one kind of helper pod declares: its pods, their result and the messages."""

    container: ClassVar[str]  # whose termination message is read

    @property
    def pods(self) -> tuple[Pod, ...]:
        """The pods of this kind, in the order of their numbers."""

    def result(self) -> WorkspaceStep | None:
        """The step once a pod has left what the job needs; None before that."""

    def create_pod(self, number: int) -> WorkspaceStep:
        """The step that creates the pod of this number."""

    def replace_pod(self, pod: Pod) -> WorkspaceStep:
        """The step for a pod that runs for an outdated input."""

    def replace_lost_pod(self, pod: Pod, loss: NodeLoss) -> WorkspaceStep:
        """The step for a pod that may still run on a lost machine."""

    def follow_pod(self, pod: Pod) -> WorkspaceStep:
        """The step while a current pod starts or runs."""

    def why_terminating(self, pod: Pod) -> Reason:
        """The reason while the pod terminates."""

    def is_current(self, pod: Pod) -> bool:
        """Whether the pod was created for the present input."""

    def is_edited(self, pod: Pod) -> bool:
        """Whether the job was edited since the pod, so that a permanent failure may be fixed."""

    def failure(self, pod: Pod, message: SyncMessage) -> PodFailure:
        """The failure that the pod's termination message describes."""


def next_step(
    kind: HelperPods, cluster_nodes: Mapping[str, Node] | None, now: datetime
) -> WorkspaceStep:
    """Return the next step towards the result of this kind of pod; the latest pod decides."""
    result = kind.result()
    if result is not None:
        return result
    if not kind.pods:
        return kind.create_pod(0)
    latest = kind.pods[-1]
    loss = find_loss(cluster_nodes, latest, now) if alive(latest) else None
    if loss is not None:
        return kind.replace_lost_pod(latest, loss)
    if latest.metadata.terminating:
        return waiting_step(kind.why_terminating(latest))
    is_current = kind.is_current(latest)
    match latest.status.phase:
        case "Failed" if is_current:
            return _after_failure(kind, latest, now)
        case "Succeeded" | "Failed":
            return kind.create_pod(next_number(kind.pods))
        case _ if not is_current:
            return kind.replace_pod(latest)
        case _:
            return kind.follow_pod(latest)


def _after_failure(kind: HelperPods, pod: Pod, now: datetime) -> WorkspaceStep:
    """Wait for the user after a permanent failure; retry any other with growing delays."""
    end = container_end(pod, kind.container)
    failure = kind.failure(pod, end.message)
    if failure.remedy and not kind.is_edited(pod):
        return refused_step(failure)
    seconds_left = 0.0 if failure.remedy else retry_seconds_left(kind.pods, end, now)
    if seconds_left <= 0:
        return kind.create_pod(next_number(kind.pods))
    delay = f"Retrying {retry_delay(kind.pods).total_seconds():.0f} s after the failure."
    return WorkspaceStep(
        state=SyncState.SYNCING,
        why=Reason(failure.reason, f"{sentence(failure.message)} {delay}"),
        failed=True,
        requeue_after=seconds_left,
    )


def create_replacement(kind: HelperPods, pod: Pod, why: Reason) -> WorkspaceStep:
    """Return the step that deletes a pod on a lost machine and creates the next one at once."""
    step = kind.create_pod(next_number(kind.pods))
    other_deletes = tuple(delete for delete in step.deletes if delete.uid != pod.metadata.uid)
    return replace(step, why=why, deletes=(*other_deletes, *delete_once(pod)))


def delete_once(pod: Pod) -> tuple[Delete, ...]:
    """Return the deletion of the pod, unless it is being deleted already."""
    return () if pod.metadata.terminating else (delete_pod(pod),)


def refused_step(failure: PodFailure) -> WorkspaceStep:
    """The step after a permanent failure: nothing is retried before the user acts."""
    why = Reason(failure.reason, f"{sentence(failure.message)} {failure.remedy}")
    return WorkspaceStep(state=SyncState.REFUSED, why=why, failed=True)


def waiting_step(why: Reason) -> WorkspaceStep:
    """A step that only waits."""
    return WorkspaceStep(state=SyncState.SYNCING, why=why)


def next_number(pods: tuple[Pod, ...]) -> int:
    """The number of the next pod; numbers are never reused while a pod of them exists."""
    return names.number_of(pods[-1].metadata.name) + 1 if pods else 0


def container_end(pod: Pod, container: str) -> ContainerEnd:
    """Return how the container ended, the last time if it is about to be restarted.

    The reason of an eviction comes before the exit code that it caused.
    """
    eviction = _find_eviction(pod) if pod.status.phase == "Failed" else None
    if eviction is not None:
        return ContainerEnd(pod.metadata.creation_timestamp, eviction)
    return own_end(pod, container)


def own_end(pod: Pod, container: str) -> ContainerEnd:
    """Return the same, whatever has happened to the pod since."""
    for status in pod.status.container_statuses:
        is_running = status.state.running is not None
        end = status.state.terminated or (None if is_running else status.last_state.terminated)
        if status.name == container and end is not None:
            message = decode_json(end.message, SyncMessage)
            # A killed program leaves no message. The kubelet then takes its log, and one
            # line of JSON is a SyncMessage without a reason.
            if message is None or (end.exit_code != 0 and not message.reason):
                lines = end.message.strip().split("\n")
                reason = "" if end.reason in GENERIC_REASONS else end.reason
                message = replace(message or SyncMessage(), reason=reason, message=lines[-1][:500])
            return ContainerEnd(end.finished_at, message)
    return ContainerEnd(pod.metadata.creation_timestamp, SyncMessage())


def _find_eviction(pod: Pod) -> SyncMessage | None:
    if pod.status.reason:
        return SyncMessage(reason=pod.status.reason, message=pod.status.message)
    disruption = find_condition(pod.status.conditions, "DisruptionTarget")
    if disruption is None or disruption.status != "True":
        return None
    return SyncMessage(reason=disruption.reason, message=disruption.message)


def retry_delay(pods: Sequence[Pod]) -> timedelta:
    """Return the delay from the end of the last of these pods to the next pod.

    It is doubled for each failure since the last pod that left its result, up to a limit.
    """
    numbers = [names.number_of(pod.metadata.name) for pod in pods]
    done = (number for number, pod in zip(numbers, pods, strict=True) if _left_result(pod))
    failures: int = numbers[-1] - max(done, default=-1)
    factor: int = 2 ** min(failures - 1, 10)
    return min(FIRST_RETRY * factor, LONGEST_RETRY)


def _left_result(pod: Pod) -> bool:
    """Whether the pod succeeded, or serves what its sync container has received."""
    if pod.status.phase != "Running":
        return pod.status.phase == "Succeeded"
    ends = (s.state.terminated for s in pod.status.container_statuses)
    return any(end is not None and end.exit_code == 0 for end in ends)


def retry_seconds_left(pods: Sequence[Pod], end: ContainerEnd, now: datetime) -> float:
    """Return the seconds of the delay that are left. end: of the last pod."""
    return seconds_left(retry_delay(pods), end.time, now)


def next_retry(pods: Sequence[Pod], container: str, now: datetime) -> float:
    """Return the seconds until the next pod may follow; 0 unless the last one has failed."""
    if not pods or pods[-1].status.phase != "Failed":
        return 0.0
    return retry_seconds_left(pods, container_end(pods[-1], container), now)
