"""What failed first: the root cause, and not the collateral on other ranks."""

from datetime import UTC, datetime, timedelta

import msgspec

from torchrun_api import names
from torchrun_api.core import Pod, StateTerminated
from torchrun_api.meta import Time, Wire
from torchrun_api.status import Attempt, LastFailure
from torchrun_controller.reconcile.gang import peer_loss
from torchrun_controller.reconcile.model import decode

SIGTERM = 15
# What the pod's own status says beats what its container could say of itself.
POD_VERDICTS = frozenset({"Evicted", "OOMKilled", "DeadlineExceeded", "NodeLost", "Preempting"})
# Reasons of the pod condition DisruptionTarget (kubernetes.io, "Pod disruption conditions").
DISRUPTIONS = frozenset(
    {
        "PreemptionByScheduler",
        "DeletionByTaintManager",
        "EvictionByEvictionAPI",
        "DeletionByPodGC",
        "TerminationByKubelet",
    }
)
POD_DELETED = "PodDeleted"
HUNG = "Hung"  # the launcher's word
# The launcher's own words: it killed its ranks because of a newer gang or dead storage; a worker
# that may still run on a lost node left no proof that it would do so.
FENCED = "Fenced"
UNPROVEN = "FenceUnproven"
BY_LAUNCHERS = frozenset({FENCED, UNPROVEN})
_LATEST = datetime.max.replace(tzinfo=UTC)


class LauncherMessage(Wire, frozen=True, kw_only=True):
    """The termination message that the launcher writes."""

    rank: decode.Number | None = None
    exit_code: decode.Number | None = None
    signal: decode.Number | None = None
    reason: decode.ReasonString = ""
    message: str = ""
    time: Time | None = None


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """How one pod of a gang failed. `disruption`: not by the job's own doing."""

    said: LastFailure
    disruption: bool = False
    conditions: tuple[str, ...] = ()


class Cause(Attempt, frozen=True, kw_only=True):
    """Why a gang was made, as its Job says it: how the one before it ended, and of what."""

    failure: LastFailure | None = None


def root_cause(pods: tuple[Pod, ...], others: tuple[Failure, ...] = ()) -> Failure | None:
    """The failure that began it.

    Verdicts on the pod (OOMKilled, Evicted, disruptions) beat a hang, a hang beats signals, signals
    beat exceptions, all of these beat the loss of a peer; then the first by time. A rank that is
    killed writes nothing itself: the pod's status is the better witness. A launcher that finds its
    ranks hung kills them; what the ranks of other nodes make of that is collateral. A pod that was
    only told to end is the cause where no other has one. `others` are failures that no pod tells
    of.
    """
    found = (_failure(pod) for pod in pods)
    failures = [*others, *(failure for failure in found if failure is not None)]
    return min(failures, key=lambda failure: precedence(failure.said), default=None)


def precedence(failure: LastFailure) -> tuple[int, datetime]:
    """Order of failures: the smallest is the root cause."""
    if failure.reason in POD_VERDICTS or failure.reason in DISRUPTIONS:
        grade = 0
    elif failure.reason == HUNG:
        grade = 1
    elif failure.reason == POD_DELETED:
        grade = 5
    elif failure.signal == SIGTERM:
        grade = 6
    elif failure.signal:
        grade = 2
    elif peer_loss.is_secondary(failure):
        grade = 4
    else:
        grade = 3
    return grade, failure.time or _LATEST


def _failure(pod: Pod) -> Failure | None:
    true = {c.type: c for c in pod.status.conditions if c.status == "True"}
    failed = pod.status.phase == "Failed"
    said = words_of(pod) if failed else None
    disruption = true.get("DisruptionTarget")
    end_of_grace = pod.metadata.deletion_timestamp
    if pod.status.phase == "Succeeded":
        return None
    if disruption is not None and (failed or end_of_grace is not None):
        reason = disruption.reason or "DisruptionTarget"
        said = _told(pod, reason, disruption.message, disruption.last_transition_time)
    elif end_of_grace is not None and (said is None or said.signal == SIGTERM):
        grace = timedelta(seconds=pod.metadata.deletion_grace_period_seconds)
        said = _told(pod, POD_DELETED, "it was deleted", end_of_grace - grace)
    if said is None:
        return None
    disrupted = disruption is not None or said.reason in (POD_DELETED, *BY_LAUNCHERS)
    return Failure(said=said, disruption=disrupted, conditions=tuple(true))


def _told(pod: Pod, reason: str, message: str, time: datetime | None) -> LastFailure:
    """A pod that was told to end."""
    return LastFailure(
        node=pod.spec.node_name,
        reason=reason,
        message=f"pod {pod.metadata.name}: {message}",
        time=time,
    )


def node_lost(pod: Pod, message: str, since: datetime | None) -> Failure:
    """The loss of a pod's node, of which the pod itself says nothing."""
    return Failure(said=_told(pod, "NodeLost", message, since), disruption=True)


def words_of(pod: Pod) -> LastFailure:
    """What the status of a failed pod and its containers' last words say."""
    ended = _terminated(pod)
    verdict = _verdict(ended.message)
    exit_code = ended.exit_code if verdict.exit_code is None else verdict.exit_code
    signal = verdict.signal or ended.signal or (exit_code - 128 if 128 < exit_code < 192 else None)
    if pod.status.reason in POD_VERDICTS:
        reason, message = pod.status.reason, pod.status.message
    elif ended.reason in POD_VERDICTS:
        reason, message = ended.reason, "the container exceeded its memory limit"
    else:
        reason = verdict.reason or ("Signal" if signal else "ExitCode")
        message = verdict.message or _last_line(ended.message) or pod.status.message
    return LastFailure(
        node=pod.spec.node_name,
        rank=verdict.rank,
        exit_code=exit_code,
        signal=signal,
        reason=reason,
        message=f"pod {pod.metadata.name}: {message}" if message else f"pod {pod.metadata.name}",
        time=_time(verdict.time, ended.finished_at),
    )


def _time(said: datetime | None, ended: datetime | None) -> datetime | None:
    """The launcher's word, but for what cannot be: it ended before its container did.

    A kubelet tells whole seconds.
    """
    if said is None or ended is None:
        return said or ended
    return ended if said - ended >= timedelta(seconds=1) else said


def _terminated(pod: Pod) -> StateTerminated:
    """How the training container ended, or the init container that never let it start."""
    ends = {
        status.name: status.state.terminated
        for status in pod.status.init_container_statuses + pod.status.container_statuses
        if status.state.terminated is not None
    }
    trainer = ends.get(names.TRAINER_CONTAINER)
    if trainer is not None:
        return trainer
    return next((ended for ended in ends.values() if ended.exit_code), StateTerminated())


def _verdict(message: str) -> LauncherMessage:
    """The launcher's words; anything else (no launcher, a cut message) is no verdict."""
    return decode.read(message, LauncherMessage) or LauncherMessage()


def _last_line(message: str) -> str:
    lines = message.strip().splitlines()
    return lines[-1].strip()[:500] if lines else ""
