"""The root cause of a failed gang, as opposed to the consequences on other ranks.

A rank that lost its peer is not the cause: the failure of the peer is, and may show up later.
"""

import re
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

import msgspec

from torchrun_api import names
from torchrun_api.contract.peer_loss import PEER_LOSS
from torchrun_api.kinds.core import Job, Pod, StateTerminated
from torchrun_api.kinds.meta import Condition
from torchrun_api.kinds.status import Attempt, LastFailure, WorkersStatus
from torchrun_api.names import MOST_GANGS
from torchrun_controller.reconcile.model.observed import (
    Number,
    ObservedGang,
    ReportedFailure,
    decode_json,
)
from torchrun_controller.reconcile.pods import head_and_workers
from torchrun_controller.reconcile.pods.lifecycle import alive

_PEER_LOSS = re.compile("|".join(PEER_LOSS), re.IGNORECASE)
# A launcher exits within a second of its rank, and its kubelet reports that within another.
# Overloaded machines took more than three seconds (at a load of 20). A restart that is some seconds
# later is better than the wrong cause.
PEER_WAIT = timedelta(seconds=10)
# The clock of the controller may be behind those of machines and API server by this much.
CLOCK_SKEW = timedelta(minutes=5)
# The launcher's reason if it stopped its ranks because of a failure on another node.
PEER_FAILED = "PeerFailed"
# The launcher's reason if all ranks stopped together because the pod of another node is to end,
# which is the cause. A disruption, unless that pod shows more.
PEER_STOPPED = "PeerStopped"
SIGABRT, SIGKILL, SIGTERM = 6, 9, 15
# Reasons of the pod's status. They win over the message of its container.
POD_VERDICTS = frozenset({"Evicted", "OOMKilled", "DeadlineExceeded", "NodeLost", "Preempting"})
# Reasons of a container without an exit status, by containerd and by the kubelet: its machine has
# restarted, or the runtime has lost it. The exit codes are invented: 255 and 137.
NO_EXIT_STATUS = frozenset({"Unknown", "ContainerStatusUnknown"})
CONTAINER_GONE = "ContainerStatusUnknown"
# Reasons of a container that did not start, by containerd, and by CRI-O and Docker.
START_ERRORS = frozenset({"StartError", "ContainerCannotRun"})
PYTHON_MISSING = "PythonMissing"  # nothing in the image can run the launcher
_NO_PYTHON = re.compile(r"python3['\"`]?:? (executable file )?not found")
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
HUNG = "Hung"  # the launcher's reason
# Reasons of the launcher. FENCED: it killed its ranks because of a newer gang or dead storage.
# UNPROVEN: a worker on a lost machine has left no proof that it would kill its ranks.
FENCED = "Fenced"
UNPROVEN = "FenceUnproven"
LAUNCHER_DISRUPTIONS = frozenset({FENCED, UNPROVEN})
_LATEST = datetime.max.replace(tzinfo=UTC)
# How long a failed Job waits for the ends of its pods, which show the root cause: watches lag. A
# watch that fails repeatedly is retried after 60 s at the latest.
WATCH_LAG = timedelta(seconds=70)


class LauncherMessage(ReportedFailure, frozen=True, kw_only=True):
    """The termination message that the launcher writes."""

    restarts_in_place: Number = 0


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """The failure of one pod of a gang.

    `disruption`: the job is not the cause. `conditions` are the types of the pod's true conditions.
    """

    details: LastFailure
    disruption: bool = False
    conditions: tuple[str, ...] = ()


class CreationCause(Attempt, frozen=True, kw_only=True):
    """Why a gang was created, from the annotation of its Job: the end of the gang before it."""

    failure: LastFailure | None = None


def find_root_cause(
    pods: tuple[Pod, ...], other_failures: tuple[Failure, ...] = ()
) -> Failure | None:
    """Return the first failure, by precedence and then by time.

    Reasons of the pod's status (OOMKilled, Evicted, disruptions) come before a hang, a hang before
    signals, signals before exceptions, and all of these before the loss of a peer. A killed rank
    writes no message, so the status of its pod knows more. A launcher kills ranks that hang; errors
    of ranks on other nodes are consequences of that. A deleted pod is the cause only where there is
    no other. `other_failures` are failures that are not in the status of a pod.
    """
    failures = [
        *other_failures,
        *(failure for pod in pods if (failure := failure_of(pod)) is not None),
    ]
    return min(failures, key=lambda failure: precedence(failure.details), default=None)


def precedence(failure: LastFailure) -> tuple[int, datetime]:
    """Return the sort key of failures: the smallest is the root cause."""
    if failure.reason in (CONTAINER_GONE, *POD_VERDICTS, *DISRUPTIONS):
        grade = 0
    elif failure.reason == HUNG:
        grade = 1
    elif failure.reason == PEER_FAILED:
        grade = 5  # the Job controller deletes the pod with the cause, which may still run
    elif failure.reason == POD_DELETED:
        grade = 6
    elif failure.reason == PEER_STOPPED:
        grade = 8
    elif failure.signal == SIGTERM:
        grade = 7
    elif failure.signal == SIGABRT:  # NCCL aborts the ranks that have lost a peer
        grade = 4
    elif failure.signal:
        grade = 2
    elif is_secondary(failure):
        grade = 5
    else:
        grade = 3
    return grade, failure.time or _LATEST


def is_secondary(failure: LastFailure) -> bool:
    """Whether the failure is the loss or the end of a peer, by its reason or its message."""
    is_of_peer = failure.reason in (PEER_FAILED, PEER_STOPPED)
    return is_of_peer or bool(_PEER_LOSS.search(failure.message))


def choose_cause(recorded: LastFailure | None, later: LastFailure) -> LastFailure:
    """Return the later failure of a gang that has ended, if it is a better root cause.

    The loss of a peer never is.
    """
    if recorded is None:
        return later
    is_better = precedence(later) < precedence(recorded)
    return later if is_better and not is_secondary(later) else recorded


def failure_of(pod: Pod) -> Failure | None:
    """Return the failure or the deletion of the pod; None if it runs or has succeeded."""
    true_conditions = {c.type: c for c in pod.status.conditions if c.status == "True"}
    has_failed = pod.status.phase == "Failed"
    details = read_failure(pod) if has_failed else None
    disruption = true_conditions.get("DisruptionTarget")
    end_of_grace = pod.metadata.deletion_timestamp
    if pod.status.phase == "Succeeded":
        return None
    if disruption is not None and (has_failed or end_of_grace is not None):
        reason = disruption.reason or "DisruptionTarget"
        message = f"Pod {pod.metadata.name}: {disruption.message}"
        details = _pod_failure(pod, reason, message, disruption.last_transition_time)
    elif end_of_grace is not None:
        deletion_time = end_of_grace - timedelta(seconds=pod.metadata.deletion_grace_period_seconds)
        never_ran = not pod.spec.node_name
        if details is None or never_ran or _is_end_by_deletion(details, deletion_time):
            message = f"Pod {pod.metadata.name} was deleted."
            details = _pod_failure(pod, POD_DELETED, message, deletion_time)
    if details is None:
        return None
    is_disruption = disruption is not None or details.reason in (
        *(POD_DELETED, CONTAINER_GONE, PEER_STOPPED),
        *LAUNCHER_DISRUPTIONS,
    )
    return Failure(details=details, disruption=is_disruption, conditions=tuple(true_conditions))


def _is_end_by_deletion(failure: LastFailure, deletion_time: datetime) -> bool:
    """Whether the pod ended by SIGTERM, or by the SIGKILL at the end of its grace period.

    A pod that was killed before its deletion may be the reason for the deletion.
    """
    if failure.signal == SIGKILL and failure.reason not in POD_VERDICTS:
        return failure.time is not None and failure.time >= deletion_time
    return failure.signal == SIGTERM


def _pod_failure(pod: Pod, reason: str, message: str, time: datetime | None) -> LastFailure:
    return LastFailure(node=pod.spec.node_name, reason=reason, message=message, time=time)


def node_failure(pod: Pod, message: str, since: datetime | None) -> Failure:
    """Return the loss of the pod's machine as a failure of the pod. message: names both."""
    return Failure(details=_pod_failure(pod, "NodeLost", message, since), disruption=True)


def read_failure(pod: Pod) -> LastFailure:
    """Return the failure from the status of a failed pod and the messages of its containers."""
    terminated = _terminated(pod)
    launcher = _launcher_message(terminated.message)
    if terminated.reason in NO_EXIT_STATUS and not launcher.reason:
        message = (
            f"Pod {pod.metadata.name}: The container is gone without an exit status: its machine"
            " restarted, or its container runtime lost it."
        )
        return _pod_failure(pod, CONTAINER_GONE, message, terminated.finished_at)
    exit_code = terminated.exit_code if launcher.exit_code is None else launcher.exit_code
    signal = (
        launcher.signal or terminated.signal or (exit_code - 128 if 128 < exit_code < 192 else None)
    )
    if pod.status.reason in POD_VERDICTS:
        reason, message = pod.status.reason, pod.status.message
    elif terminated.reason in POD_VERDICTS:
        reason, message = terminated.reason, "The container exceeded its memory limit."
    elif terminated.reason in START_ERRORS and not launcher.reason:
        reason, message = _start_error(terminated)
    else:
        reason = launcher.reason or ("Signaled" if signal else "ExitCode")
        message = launcher.message or _last_line(terminated.message) or pod.status.message
    return LastFailure(
        node=pod.spec.node_name,
        rank=launcher.rank,
        exit_code=exit_code,
        signal=signal,
        reason=reason,
        message=f"Pod {pod.metadata.name}: {message}"
        if message
        else f"Pod {pod.metadata.name} failed",
        time=_end_time(launcher.time, terminated.finished_at),
    )


def _start_error(terminated: StateTerminated) -> tuple[str, str]:
    """Return reason and message of a container that did not start, as the runtime reports it."""
    if _NO_PYTHON.search(terminated.message):
        return PYTHON_MISSING, (
            "The image has no python3 on PATH, which runs the launcher. Use an image with Python"
            " 3.8 or later, or name its folder in spec.env, such as PATH=/opt/conda/bin:/usr/bin."
        )
    return terminated.reason, _last_line(terminated.message) or "The container cannot start."


def termination_message(pod: Pod) -> str:
    """Return the last message of a pod that has ended; "" for none."""
    return _terminated(pod).message


def read_restarts(pod: Pod) -> int:
    """Return how often the ranks were restarted in place, from the message of a pod that ended."""
    restarts = _launcher_message(_terminated(pod).message).restarts_in_place
    return min(max(restarts, 0), MOST_GANGS)


def _end_time(by_launcher: datetime | None, by_kubelet: datetime | None) -> datetime | None:
    """Return the launcher's time, unless it is after the end of the container.

    The kubelet's time has whole seconds.
    """
    if by_launcher is None or by_kubelet is None:
        return by_launcher or by_kubelet
    return by_kubelet if by_launcher - by_kubelet >= timedelta(seconds=1) else by_launcher


def _terminated(pod: Pod) -> StateTerminated:
    """Return the end of the training container, or of the init container that failed before it."""
    ends = {
        status.name: status.state.terminated
        for status in pod.status.init_container_statuses + pod.status.container_statuses
        if status.state.terminated is not None
    }
    trainer = ends.get(names.TRAINER_CONTAINER)
    if trainer is not None:
        return trainer
    return next((end for end in ends.values() if end.exit_code), StateTerminated())


def _launcher_message(message: str) -> LauncherMessage:
    """Return the launcher's message; an empty one where there is none, or a truncated one."""
    return decode_json(message, LauncherMessage) or LauncherMessage()


def _last_line(message: str) -> str:
    lines = message.strip().splitlines()
    return lines[-1].strip()[:500] if lines else ""


def failure_of_job(
    gang: ObservedGang, child: Job, failed: Condition, recorded: WorkersStatus | None
) -> Failure:
    """Return the failure of a Job by its condition. `recorded`: the workers in the status, if any.

    Missing pods that have run were removed, which is a disruption. Others may have failed unseen.
    """
    return Failure(
        details=LastFailure(
            reason=failed.reason or "JobFailed",
            message=failed.message or f"Job {child.metadata.name} failed",
            time=failed.last_transition_time,
        ),
        disruption=_misses_pods(gang) and (recorded is None or not recorded.pending),
    )


def pods_wait_left(
    gang: ObservedGang,
    child: Job,
    failure: LastFailure,
    recorded: WorkersStatus | None,
    now: datetime,
) -> float | None:
    """Return the seconds for which the cache may still show the ends of the pods; None for no wait.

    A Job fails only when all of its pods have ended. A pod that still runs in the cache is outdated
    there, and a pod that was never seen may be new. A pod that was seen and is gone was removed.
    """
    own_pods = (pod for pod in gang.workers if pod.metadata.controlled_by(child.metadata.uid))
    is_outdated = any(alive(pod) for pod in own_pods)
    has_unseen_pods = _misses_pods(gang) and (recorded is None or recorded.pending > 0)
    return _wait_left(failure, now, WATCH_LAG) if is_outdated or has_unseen_pods else None


def _misses_pods(gang: ObservedGang) -> bool:
    return len(gang.workers) < head_and_workers.nodes_of(gang.current_job)


def peer_wait_left(failure: LastFailure, pods: Iterable[Pod], now: datetime) -> float | None:
    """Return the seconds to wait for the failure of the peer; None where it cannot come."""
    if not is_secondary(failure) or not any(alive(pod) for pod in pods):
        return None
    return _wait_left(failure, now, PEER_WAIT)


def _wait_left(failure: LastFailure, now: datetime, wait: timedelta) -> float | None:
    """Return the seconds that are left of `wait` since the failure; None for no more.

    A time in the future is that of a clock that is ahead: the whole wait is left. Nothing waits for
    a time that is further ahead than CLOCK_SKEW.
    """
    if failure.time is None or not -CLOCK_SKEW <= (age := now - failure.time) < wait:
        return None
    return (wait - max(age, timedelta())).total_seconds()
