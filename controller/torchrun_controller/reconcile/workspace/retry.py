"""How a sync or a setup pod ended, and when the next one may follow."""

from datetime import datetime, timedelta
from typing import Annotated

import msgspec
from msgspec import Meta

from torchrun_api import names
from torchrun_api.core import Pod
from torchrun_api.meta import Wire
from torchrun_controller.reconcile.model import decode
from torchrun_controller.reconcile.model.conditions import find_condition
from torchrun_controller.reconcile.model.times import seconds_left

FIRST_RETRY = timedelta(seconds=10)
LONGEST_RETRY = timedelta(minutes=5)
# The kubelet's words that say no more than an exit code.
WORDLESS = frozenset({"Error", "Completed"})


class SyncMessage(Wire, frozen=True, kw_only=True):
    """The termination message of the pod's program: what it made, or why it did not."""

    commit: str = ""
    sha256: str = ""
    manifest: str = ""
    revision: Annotated[int, Meta(ge=0, lt=10**15)] = 0
    bytes: int = 0
    reason: decode.ReasonString = ""
    message: str = ""
    permanent: bool = False


class End(msgspec.Struct, frozen=True):
    """When the container ended, None where nothing says so, and its termination message."""

    time: datetime | None
    message: SyncMessage


def end_of(pod: Pod, container: str) -> End:
    """How the container ended, or did the last time where it is about to be started again.

    A pod that was driven out is not blamed for its exit code.
    """
    why = _why_driven_out(pod) if pod.status.phase == "Failed" else None
    if why is not None:
        return End(pod.metadata.creation_timestamp, why)
    for status in pod.status.container_statuses:
        running = status.state.running is not None
        ended = status.state.terminated or (None if running else status.last_state.terminated)
        if status.name == container and ended is not None:
            said = decode.read(ended.message, SyncMessage)
            if said is None:
                lines = ended.message.strip().split("\n")
                reason = "" if ended.reason in WORDLESS else ended.reason
                said = SyncMessage(reason=reason, message=lines[-1][:500])
            return End(ended.finished_at, said)
    return End(pod.metadata.creation_timestamp, SyncMessage())


def _why_driven_out(pod: Pod) -> SyncMessage | None:
    if pod.status.reason:
        return SyncMessage(reason=pod.status.reason, message=pod.status.message)
    found = find_condition(pod.status.conditions, "DisruptionTarget")
    if found is None or found.status != "True":
        return None
    return SyncMessage(reason=found.reason, message=found.message)


def delay(pod: Pod) -> timedelta:
    """From the end of this pod to the next: doubled with each, up to a limit."""
    factor: int = 2 ** min(names.number_of(pod.metadata.name), 10)
    return min(FIRST_RETRY * factor, LONGEST_RETRY)


def left(pod: Pod, end: End, now: datetime) -> float:
    """Seconds of the same that are still to pass."""
    return seconds_left(delay(pod), end.time, now)
