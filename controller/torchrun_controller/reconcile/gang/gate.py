"""What workers are told: the start gate, and the code that they shall run.

No rank of a gang starts beside one of an older gang that may still run.
"""

from datetime import datetime

from torchrun_api import names
from torchrun_api.core import Job, Pod
from torchrun_api.json import JsonObject
from torchrun_api.kinds import PODS
from torchrun_api.status import UnfencedWorker
from torchrun_controller.reconcile.gang import fence
from torchrun_controller.reconcile.gang.orphans import orphans, way_out
from torchrun_controller.reconcile.model.conditions import Reason
from torchrun_controller.reconcile.model.observed import Observed
from torchrun_controller.reconcile.model.plan import Apply
from torchrun_controller.reconcile.pods import head_and_workers, nodes
from torchrun_controller.reconcile.pods.lifecycle import alive, attempt_of
from torchrun_controller.reconcile.workspace import reload

NAMED = 4
# A kubelet that brings one state of a pod into its volumes notes when it ends that all is there,
# whatever has arrived meanwhile (processPodVolumes of its desired_state_of_world_populator.go,
# MarkVolumeAsMounted). A patch that falls into this, most often as containers start, is in the
# annotations and for 60 to 90 s not in the launcher's file. That work takes well under a second:
# of two patches with these seconds between them one is seen at once.
REPEAT_SECONDS = 4


def instruct(observed: Observed, now: datetime) -> tuple[Apply, ...]:
    """What the workers' launchers are to be told and have not been, or not twice.

    The go-ahead, where the gang may start; the workspace's revision, where all can change together.
    """
    child = observed.gang.current_job
    blocking_pods = fence.blocking_pods(observed, attempt_of(child.metadata), now)
    safe = not blocking_pods.pods and _by_epoch(child, blocking_pods.unfenced)
    opens = safe and head_and_workers.is_whole(observed.gang)
    start: JsonObject = {names.START: str(attempt_of(child.metadata))}
    if opens and blocking_pods.unfenced:
        start[names.FENCE] = fence.instruction(blocking_pods.unfenced, now)
    together = all(alive(pod) for pod in observed.gang.workers)
    code = reload.told(observed) if together else {}
    return tuple(
        tell
        for pod in observed.gang.workers
        if alive(pod) and (tell := _tell(pod, start if opens else {}, code, now)) is not None
    )


def next_look(observed: Observed, now: datetime) -> float | None:
    """Seconds until a worker is to be told again."""
    ends = (_repeat_left(pod, now) for pod in observed.gang.workers if alive(pod))
    return min((seconds for seconds in ends if seconds), default=None)


def _repeat_left(pod: Pod, now: datetime) -> float | None:
    """Seconds until the pod is to be told again; None where it has been.

    A time that lies ahead is that of another clock, and no reason to wait.
    """
    if not pod.metadata.annotations.told:
        return None
    told = fence.time_of(pod.metadata.annotations.told)
    passed = (now - told).total_seconds() if told else REPEAT_SECONDS
    return REPEAT_SECONDS - passed if 0 <= passed < REPEAT_SECONDS else 0


def _tell(pod: Pod, start: JsonObject, code: JsonObject, now: datetime) -> Apply | None:
    """All annotations that are ours: what is left out of an apply is taken away.

    What is new comes with its time. To tell it again is to take that away.
    """
    said = pod.metadata.annotations
    before: JsonObject = {
        names.START: said.start,
        names.FENCE: said.fence,
        names.REVISION: said.revision,
        names.SERVED: said.served,
        names.DEVELOPMENT: said.development,
    }
    before = {name: value for name, value in before.items() if value}
    opened = said.start == start.get(names.START)
    after = {**before, **({} if opened else start), **code}
    if code and names.DEVELOPMENT not in code:
        after.pop(names.DEVELOPMENT, None)
    if after != before:
        after[names.TOLD] = fence.stamp(now)
    elif _repeat_left(pod, now) != 0:
        return None
    metadata: JsonObject = {
        "name": pod.metadata.name,
        "namespace": pod.metadata.namespace,
        "annotations": after,
    }
    body: JsonObject = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata}
    return Apply(PODS, body, uid=pod.metadata.uid)


def is_open(observed: Observed) -> bool:
    """Whether every worker has the go-ahead."""
    child = observed.gang.current_job
    attempt = attempt_of(child.metadata)
    told = [
        pod
        for pod in observed.gang.workers
        if pod.metadata.annotations.start == str(attempt) or not alive(pod)
    ]
    return len(told) >= head_and_workers.nodes_of(child)


def why_closed(observed: Observed, now: datetime) -> Reason | None:
    """What keeps ranks of older gangs from being known to have stopped; None: nothing does."""
    if is_open(observed):
        return _why_fencing(observed, now)
    child = observed.gang.current_job
    blocking_pods = fence.blocking_pods(observed, attempt_of(child.metadata), now)
    if blocking_pods.pods:
        told = ", ".join(sorted(pod.metadata.name for pod in blocking_pods.pods)[:NAMED])
        message = f"{len(blocking_pods.pods)} workers of an earlier gang still end: {told}"
        left = tuple(pod for pod in orphans(observed) if pod in blocking_pods.pods)
        if left:
            return Reason("OrphanedWorkers", f"{message}. {way_out(left)}")
        return Reason("WaitingForOldGang", message)
    return (
        None
        if _by_epoch(child, blocking_pods.unfenced)
        else _why_held(observed, blocking_pods.unfenced)
    )


def _by_epoch(child: Job, unfenced: tuple[UnfencedWorker, ...]) -> bool:
    """Whether the launchers can fence these workers themselves, through the state directory."""
    if not unfenced:
        return True
    shared = child.metadata.annotations.state == "true"
    return shared and all(w.attempt is not None and not w.unproven for w in unfenced)


def _why_held(observed: Observed, unfenced: tuple[UnfencedWorker, ...]) -> Reason:
    first = unfenced[0]
    since = f" since {first.since:%Y-%m-%dT%H:%M:%SZ}" if first.since else ""
    lost = {worker.node for worker in unfenced}
    more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
    return Reason(
        "WaitingForFence",
        f"{len(unfenced)} workers of an earlier gang may still run and write checkpoints on node"
        f" {first.node}{more}, lost{since}. Any of these starts the new gang: the node comes back;"
        f" the machine is off and you say so ({_vouch(observed, unfenced)});"
        " spec.reliability.allowUnfencedRestart is set to true",
    )


def _vouch(observed: Observed, unfenced: tuple[UnfencedWorker, ...]) -> str:
    """How to say that the machines are off: at their Nodes, or where they have none any more."""
    known = observed.cluster.nodes or {}
    there = next((worker.node for worker in unfenced if worker.node in known), None)
    gone = [worker for worker in unfenced if worker.node not in known]
    ways = []
    if there is not None:
        ways.append(f"kubectl taint nodes {there} {nodes.OUT_OF_SERVICE}=nodeshutdown:NoExecute")
    if gone:
        meta = observed.job.metadata
        machines = sorted({fence.vouched(worker) for worker in gone})
        more = f" and {len(machines) - NAMED} more" if len(machines) > NAMED else ""
        ways.append(
            f"without a Node object: kubectl annotate torchrunjob {meta.name} -n {meta.namespace}"
            f" --overwrite {names.MACHINES_OFF}={','.join(machines[:NAMED])}{more}"
        )
    return "; ".join(ways)


def _why_fencing(observed: Observed, now: datetime) -> Reason | None:
    since = fence.fencing_since(observed)
    if since is None or (now - since).total_seconds() >= fence.FENCE_SECONDS:
        return None
    return Reason(
        "Fencing",
        "workers of an earlier gang may still run on lost nodes; they kill their ranks when they"
        " see the new gang's epoch or no storage. Ranks start within"
        f" {fence.FENCE_SECONDS} s of {since:%Y-%m-%dT%H:%M:%SZ}",
    )
