"""The start gate, and other annotations for the launchers of the workers.

No rank of a gang starts while a rank of an older gang may still run.
"""

from collections.abc import Mapping
from datetime import datetime

from torchrun_api import names
from torchrun_api.json import JsonObject
from torchrun_api.kinds.core import Job, Node, Pod
from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.resources import JOBS, PODS
from torchrun_api.kinds.status import UnfencedWorker
from torchrun_controller.reconcile.gang import checkpoints, fence
from torchrun_controller.reconcile.gang.fence import (
    BlockingPods,
    fence_annotation,
    format_time,
    parse_time,
)
from torchrun_controller.reconcile.gang.restarts import NewRestarts, predecessor_annotation
from torchrun_controller.reconcile.model.conditions import Reason
from torchrun_controller.reconcile.model.messages import count_of, list_names
from torchrun_controller.reconcile.model.observed import (
    Observed,
    ObservedGang,
    ObservedWorkspace,
    RefusedWrites,
)
from torchrun_controller.reconcile.model.plan import Apply
from torchrun_controller.reconcile.pods import head_and_workers
from torchrun_controller.reconcile.pods.lifecycle import (
    PodState,
    alive,
    attempt_of,
    follows_leader,
    has_own_start,
    has_started,
    state_of,
)
from torchrun_controller.reconcile.pods.nodes import OUT_OF_SERVICE, is_ready
from torchrun_controller.reconcile.workspace import reload

# A kubelet that has written a pod's annotations into a volume marks the volume as up to date, even
# if the annotations changed meanwhile (processPodVolumes in desired_state_of_world_populator.go,
# MarkVolumeAsMounted). Such a change, most often while containers start, reaches the launcher's
# file only after 60 to 90 s. The write takes well under a second, so the second of two patches with
# this distance is seen at once.
REPEAT_SECONDS = 4


def instruct_launchers(
    job: TorchrunJob,
    gang: ObservedGang,
    workspace: ObservedWorkspace,
    blocking_pods: BlockingPods,
    restarts: NewRestarts,
    now: datetime,
) -> tuple[Apply, ...]:
    """Return the annotations that the workers lack, or that are to be written a second time.

    The start, if the gang may start; the workspace's revision, if all workers can change together.
    Workers that follow their leader get neither, except for the address of newer served code.
    """
    child = gang.current_job
    may_open = not blocking_pods.pods and _can_fence(child, blocking_pods.unfenced)
    predecessor = predecessor_annotation(job, gang, restarts)
    saved = checkpoints.annotate(gang.checkpoints)
    start = {**predecessor, **saved}
    if may_open and blocking_pods.unfenced:
        start[names.FENCE] = fence_annotation(blocking_pods.unfenced, now)
    all_alive = all(alive(pod) for pod in gang.workers)
    code = reload.build_annotations(job, workspace) if all_alive else {}
    applies = []
    for pod in filter(alive, gang.workers):
        code_of_pod = {} if follows_leader(pod) and names.SERVED not in code else code
        may_start = may_open and not follows_leader(pod)
        start_of_pod = {names.START: pod.metadata.labels.attempt, **start} if may_start else {}
        if has_own_start(pod):
            has_count = bool(pod.metadata.annotations.restarts_in_place)
            left = {**({} if has_count else predecessor), **saved}
            start_of_pod = left if _awaits_predecessor(gang, pod) else {}
        applies.append(_annotate(pod, start_of_pod, code_of_pod, now))
    return tuple(apply for apply in applies if apply is not None)


def _annotate(pod: Pod, start: JsonObject, code: JsonObject, now: datetime) -> Apply | None:
    """Return an apply of all annotations of the controller: an apply removes what it leaves out.

    New values come with their time. The second write removes the time.
    """
    annotations = pod.metadata.annotations
    before: JsonObject = {
        names.START: annotations.start,
        names.FENCE: annotations.fence,
        names.IN_PLACE: annotations.restarts_in_place,
        names.COMPLETE_CHECKPOINTS: annotations.checkpoints,
        names.REVISION: annotations.revision,
        names.SERVED: annotations.served,
        names.DEVELOPMENT: annotations.development,
    }
    before = {name: value for name, value in before.items() if value}
    after = {**before, **start, **code}
    if code and names.DEVELOPMENT not in code:
        after.pop(names.DEVELOPMENT, None)
    if after != before:
        after[names.NOTIFICATION_TIME] = format_time(now)
    elif _repeat_left(pod, now) != 0:
        return None
    metadata: JsonObject = {
        "name": pod.metadata.name,
        "namespace": pod.metadata.namespace,
        "annotations": after,
    }
    body: JsonObject = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata}
    return Apply(PODS, body, uid=pod.metadata.uid)


def next_repeat(gang: ObservedGang, now: datetime) -> float | None:
    """Return the seconds until the annotations of a worker are to be written a second time."""
    waits = (_repeat_left(pod, now) for pod in gang.workers if alive(pod))
    return min((seconds for seconds in waits if seconds), default=None)


def _repeat_left(pod: Pod, now: datetime) -> float | None:
    """Return the seconds until the second write of the annotations; None once it was done.

    A time in the future comes from another clock, so the second write does not wait.
    """
    if not pod.metadata.annotations.notification_time:
        return None
    notified_at = parse_time(pod.metadata.annotations.notification_time)
    age = (now - notified_at).total_seconds() if notified_at else REPEAT_SECONDS
    return REPEAT_SECONDS - age if 0 <= age < REPEAT_SECONDS else 0


def _awaits_predecessor(gang: ObservedGang, pod: Pod) -> bool:
    """Whether the launcher of a pod whose gate is open has yet to learn of an earlier pod.

    The template of a Job that somebody has suspended and resumed may open the gate of its new pods.
    Their launchers read the annotation once, after the containers have started.
    """
    if follows_leader(pod) or head_and_workers.resumption_of(gang) is None:
        return False
    return pod.status.phase == "Pending"


def is_open(gang: ObservedGang) -> bool:
    """Whether every worker exists, and may start its ranks."""
    started = has_started(gang.workers)
    started_count = sum(started(pod) or not alive(pod) for pod in gang.workers)
    return started_count >= head_and_workers.nodes_of(gang.current_job)


def closed_reason(
    observed: Observed, unfenced: tuple[UnfencedWorker, ...], now: datetime
) -> Reason | None:
    """Return why ranks may not start, or wait for the fence; None if older ranks have stopped."""
    job, gang, nodes = observed.job, observed.gang, observed.cluster.nodes
    if is_open(gang):
        return _fencing_reason(gang, now)
    child = gang.current_job
    blocking_pods = fence.blocking_pods(gang, nodes, unfenced, attempt_of(child), now)
    if blocking_pods.pods:
        pod_names = list_names(pod.metadata.name for pod in blocking_pods.pods)
        message = (
            f"Waiting for {count_of(len(blocking_pods.pods), 'pod')} of the previous gang to"
            f" terminate: {pod_names}."
        )
        orphans = tuple(
            pod for pod in find_orphans(gang, observed.refused) if pod in blocking_pods.pods
        )
        if orphans:
            return Reason("OrphanedWorkers", f"{message} {orphan_advice(orphans)}")
        return Reason("WaitingForOldGang", message)
    if _can_fence(child, blocking_pods.unfenced):
        return None
    return _unfenced_reason(job, nodes, blocking_pods.unfenced)


def _can_fence(child: Job, unfenced: tuple[UnfencedWorker, ...]) -> bool:
    """Whether the launchers can fence these workers, through the shared state directory."""
    if not unfenced:
        return True
    shares_state = child.metadata.annotations.state == "true"
    return shares_state and all(w.attempt is not None and not w.unproven for w in unfenced)


def _unfenced_reason(
    job: TorchrunJob, nodes: Mapping[str, Node] | None, unfenced: tuple[UnfencedWorker, ...]
) -> Reason:
    first_loss = min((worker.since for worker in unfenced if worker.since), default=None)
    since = f" since {first_loss:%Y-%m-%dT%H:%M:%SZ}" if first_loss else ""
    lost_machines = list_names({worker.node for worker in unfenced}, 1)
    if all(
        worker.node in (nodes or {}) and is_ready((nodes or {})[worker.node]) for worker in unfenced
    ):
        return Reason(
            "WaitingForOldGang",
            f"{count_of(len(unfenced), 'pod')} of the previous attempt may still run on machine"
            f" {lost_machines}, without a pod in the API{since}. The next attempt starts after"
            " their grace period. Set spec.reliability.allowUnfencedRestart to start it now.",
        )
    return Reason(
        "WaitingForFence",
        f"{count_of(len(unfenced), 'pod')} of the previous attempt may still run and write"
        f" checkpoints on machine {lost_machines}, lost{since}. The next attempt starts when the"
        " machine returns, when you confirm that it is off"
        f" ({_release_commands(job, nodes, unfenced)}), or when"
        " spec.reliability.allowUnfencedRestart is true.",
    )


def _release_commands(
    job: TorchrunJob, nodes: Mapping[str, Node] | None, unfenced: tuple[UnfencedWorker, ...]
) -> str:
    """Return the commands that declare the machines off, with or without a Node object."""
    nodes_by_name = nodes or {}
    node = next((worker.node for worker in unfenced if worker.node in nodes_by_name), None)
    without_node = [worker for worker in unfenced if worker.node not in nodes_by_name]
    commands = []
    if node is not None:
        commands.append(f"kubectl taint nodes {node} {OUT_OF_SERVICE}=nodeshutdown:NoExecute")
    if without_node:
        meta = job.metadata
        machines = list_names({fence.machine_of(w) for w in without_node}, separator=",")
        commands.append(
            f"if the Node object is gone: kubectl annotate torchrunjob {meta.name}"
            f" -n {meta.namespace} --overwrite {names.MACHINES_OFF}={machines}"
        )
    return "; ".join(commands)


def _fencing_reason(gang: ObservedGang, now: datetime) -> Reason | None:
    since = fence.fencing_since(gang)
    if since is None or (now - since).total_seconds() >= fence.FENCE_SECONDS:
        return None
    return Reason(
        "Fencing",
        "Pods of the previous attempt may still run on lost machines. They kill their ranks when"
        " they see the epoch of the new attempt or lose the storage. The ranks of the new attempt"
        f" start within {fence.FENCE_SECONDS} s of {since:%Y-%m-%dT%H:%M:%SZ}.",
    )


def find_orphans(gang: ObservedGang, refused: RefusedWrites) -> tuple[Pod, ...]:
    """Return the orphans that run. The garbage collector deletes pods whose Job is gone."""
    foreign = {c.name for c in refused.conflicts if c.resource == JOBS.resource}
    return tuple(
        pod
        for pod in gang.stale_pods
        if state_of(pod) is PodState.ACTIVE
        if all(owner.name in foreign for owner in pod.metadata.owner_references if owner.controller)
    )


def orphan_advice(pods: tuple[Pod, ...]) -> str:
    """Return what the user can do about these orphans; "" for none."""
    if not pods:
        return ""
    pod_names = list_names((pod.metadata.name for pod in pods), separator=" ")
    verb, pronoun = ("is", "it") if len(pods) == 1 else ("are", "them")
    return (
        f"{count_of(len(pods), 'pod')} {verb} not controlled by a Job of this TorchrunJob and may"
        f" still train. Delete {pronoun} (kubectl delete pod"
        f" -n {pods[0].metadata.namespace} {pod_names})."
    )
