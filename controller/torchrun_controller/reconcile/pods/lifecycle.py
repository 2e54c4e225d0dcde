"""The states of a pod, and the deletion of pods and Jobs."""

from collections.abc import Callable
from enum import Enum

from torchrun_api import names
from torchrun_api.kinds.core import Job, Pod
from torchrun_api.kinds.meta import ChildMeta, find_controller
from torchrun_api.kinds.resources import JOBS, PODS
from torchrun_api.kinds.status import WorkersStatus
from torchrun_controller.reconcile.model.conditions import find_condition, find_true
from torchrun_controller.reconcile.model.plan import Delete

# Conditions of a Job whose end is certain. The first two come before its pods have ended.
_VERDICTS = frozenset({"FailureTarget", "SuccessCriteriaMet", "Complete", "Failed"})


class PodState(Enum):
    """What the API shows of a pod, and what follows.

    | state | the API shows | its containers | the gate of the next gang |
    |---|---|---|---|
    | ACTIVE | no deletion and no end | run, or will run | waits; the controller deletes the pod |
    | TERMINATING | a deletion, no end yet | run for their grace period | waits |
    | COLLECTED | Failed, by the garbage collector | may run | waits for the fence |
    | ENDED | Succeeded or Failed | have ended, or never ran | waits if the machine is silent |
    | STOPPED | the end of every container | have ended | does not wait |

    A lost machine reports nothing (`nodes.find_loss`). The ranks of a pod on it may go on, whatever
    its state but STOPPED, and the gate waits for the fence of this worker instead of its pod
    (`gang/fence.py`). The same holds for a pod that vanished before its end was seen.

    Other words say whose pod it is. Workers are the pods of the present gang, stale pods those of
    other gangs. An orphan is a stale pod that no Job of the TorchrunJob controls.
    """

    ACTIVE = "active"
    TERMINATING = "terminating"
    COLLECTED = "collected"
    ENDED = "ended"
    STOPPED = "stopped"


# The states in which containers may run, whatever the phase.
MAY_RUN = frozenset({PodState.ACTIVE, PodState.TERMINATING, PodState.COLLECTED})


def state_of(pod: Pod) -> PodState:
    """Return the state of the pod.

    The garbage collector sets the phase once the Node object is gone, and does not know whether the
    containers run (gc_controller.go of Kubernetes, markFailedAndDeletePodWithCondition).
    """
    if alive(pod):
        return PodState.TERMINATING if pod.metadata.terminating else PodState.ACTIVE
    statuses = pod.status.container_statuses
    if statuses and all(status.state.terminated is not None for status in statuses):
        return PodState.STOPPED
    disruption = find_condition(pod.status.conditions, "DisruptionTarget")
    if disruption is not None and disruption.reason == "DeletionByPodGC":
        return PodState.COLLECTED
    return PodState.ENDED


def alive(pod: Pod) -> bool:
    """Whether the pod is ACTIVE or TERMINATING, by its phase."""
    return pod.status.phase not in ("Succeeded", "Failed")


def count_workers(pods: tuple[Pod, ...], nodes: int) -> WorkersStatus:
    """Count the workers by state. A worker without a pod counts as pending."""
    phases = [pod.status.phase for pod in pods]
    failed, succeeded = phases.count("Failed"), phases.count("Succeeded")
    running = sum(_is_running(pod) for pod in pods)
    return WorkersStatus(
        pending=max(0, nodes - running - failed - succeeded),
        ready=sum(find_true(pod.status.conditions, "Ready") is not None for pod in pods),
        running=running,
        failed=failed,
        succeeded=succeeded,
    )


def _is_running(pod: Pod) -> bool:
    """Whether the container with the ranks runs.

    The phase is Pending as long as any other container cannot start (kubelet, getPhase).
    """
    if pod.status.phase != "Pending":
        return pod.status.phase == "Running"
    return any(
        status.name == names.TRAINER_CONTAINER and status.state.running is not None
        for status in pod.status.container_statuses
    )


def count_scheduled(pods: tuple[Pod, ...]) -> int:
    """Count the pods that have a machine."""
    return sum(bool(pod.spec.node_name) for pod in pods)


def index_of(pod: Pod) -> int:
    """Return the index of a worker in its gang; workers of a head start at 1."""
    return pod.metadata.labels.rank


def attempt_of(child: Job | Pod) -> int:
    """Return the number of the attempt of a child Job or a worker, from its label."""
    return child.metadata.labels.attempt_number


def has_own_start(pod: Pod) -> bool:
    """Whether the pod has the annotation that starts the ranks of its attempt."""
    return pod.metadata.annotations.start == pod.metadata.labels.attempt


def follows_leader(pod: Pod) -> bool:
    """Whether the pod gets its orders from the pod of node 0, such as the start of its ranks."""
    return pod.metadata.annotations.gate == names.LEADER and index_of(pod) != 0


def has_started(pods: tuple[Pod, ...]) -> Callable[[Pod], bool]:
    """Return whether a pod of this gang may have started its ranks, as a function of the pod."""
    leader_has_started = any(index_of(pod) == 0 and has_own_start(pod) for pod in pods)
    return lambda pod: has_own_start(pod) or (follows_leader(pod) and leader_has_started)


def delete_pod(pod: Pod, grace_seconds: int | None = None) -> Delete:
    """Delete exactly this pod. Without `grace_seconds` its own grace period applies."""
    return Delete.of(PODS, pod.metadata, grace_seconds=grace_seconds)


def delete_job(job: Job) -> Delete:
    """Delete the Job with its pods, which get their full grace period.

    The delete carries the resource version: a Job that has succeeded meanwhile is not deleted.
    """
    return Delete.of(JOBS, job.metadata, resource_version=job.metadata.resource_version)


def may_create_pods(job: Job) -> bool:
    """Whether the Job has no verdict. A pod on a lost machine delays its end, not the verdict."""
    conditions = {c.type for c in job.status.conditions if c.status == "True"}
    return not job.metadata.terminating and _VERDICTS.isdisjoint(conditions)


def is_worker_of(job: str, meta: ChildMeta) -> bool:
    """Whether a Job of any attempt, or of an earlier job of this name, created the pod.

    A Job owns its pods. A pod whose Job was deleted with --cascade=orphan has no owner, but a name
    with the Job's name as prefix.
    """
    owner = find_controller(meta.owner_references)
    if owner is None:
        return names.is_worker(job, meta.name)
    return owner.kind == JOBS.kind and names.is_child_job(job, owner.name)


def uses_room(pod: Pod) -> bool:
    """Whether the pod uses the room of a gang."""
    meta, labels = pod.metadata, pod.metadata.labels
    return labels.component == names.WORKER and is_worker_of(labels.torchrun_job, meta)
