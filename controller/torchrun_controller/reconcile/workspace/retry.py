"""How a sync or a setup pod ended, and when the next one may follow."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Annotated

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from torchrun_api import names
from torchrun_api.core import Pod
from torchrun_api.meta import Wire
from torchrun_controller.reconcile.model import decode
from torchrun_controller.reconcile.model.conditions import find_condition
from torchrun_controller.reconcile.model.times import seconds_left

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
    reason: decode.ReasonString = ""
    message: str = ""
    permanent: bool = False


class ContainerEnd(msgspec.Struct, frozen=True):
    """When a container ended, None if unknown, and its termination message."""

    time: datetime | None
    message: SyncMessage


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
            message = decode.read(end.message, SyncMessage)
            # A killed program leaves no message of its own. The kubelet then takes its log, and one
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
