"""Elastic jobs: fewer nodes while some are missing, spec.numNodes when they are back.

Users set spec.numNodes (`kubectl scale`, within minNodes and maxNodes). A gang that cannot be
scheduled whole for a while is replaced by a gang of as many workers as have a node, at least
minNodes. Probe pods with the requests and constraints of a worker show whether there is room again;
free capacity is never computed from nodes. Each resize is a new gang that goes on from the
checkpoint. It counts neither as a restart nor as a disruption.
"""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from msgspec import Struct
from msgspec.structs import replace

from torchrun_api.core import Node, Pod
from torchrun_api.job import Elastic, TorchrunJob
from torchrun_api.meta import ConditionStatus
from torchrun_controller.reconcile.gang.cleanup import resized_jobs
from torchrun_controller.reconcile.gang.gang import BY_THE_USER, GROWING, SHRINKING
from torchrun_controller.reconcile.gang.probe import missing_probes
from torchrun_controller.reconcile.gang.replacement import SCHEDULE_WITHIN
from torchrun_controller.reconcile.model.conditions import ConditionUpdate, Reason, find_condition
from torchrun_controller.reconcile.model.messages import count_of, pods_are, sentence
from torchrun_controller.reconcile.model.observed import Defaults, Observed, ObservedGang
from torchrun_controller.reconcile.model.phases import State
from torchrun_controller.reconcile.model.plan import Apply, Delete
from torchrun_controller.reconcile.pods import head_and_workers
from torchrun_controller.reconcile.pods.lifecycle import (
    alive,
    count_scheduled,
    delete_job,
    delete_pod,
    predecessors_of,
)
from torchrun_controller.reconcile.pods.nodes import find_loss
from torchrun_controller.reconcile.spec import admission_status

# Time for the scheduler to find nodes for a whole gang, before a smaller one is created.
SHRINK_AFTER = SCHEDULE_WITHIN
# Time after the first probe finds room: nodes that come back together are used together.
SETTLE = timedelta(seconds=10)
MOST_PROBES = 16
_EARLIEST = datetime.min.replace(tzinfo=UTC)


class Outlook(Struct, frozen=True, kw_only=True):
    """The decision on the size of a gang: a resize to `nodes`, or a condition and a wait.

    A resize has a condition for the time that it has to wait. One with `probes` needs room first,
    for which that many probe pods ask the scheduler.
    """

    nodes: int | None = None
    why: Reason | None = None  # of the resize
    condition: ConditionUpdate | None = None
    probes: int = 0
    requeue_after: float | None = None

    @property
    def releases_nodes(self) -> bool:
        """Whether the condition reports that admitted nodes are not used."""
        return (
            self.condition is not None and self.condition.why.reason == admission_status.GIVES_BACK
        )


def evaluate_size(
    observed: Observed, state: State, now: datetime, grow_after: timedelta
) -> Outlook:
    """Decide on the size of a gang in this state; no decision unless the job is elastic.

    `grow_after` is the age at which a gang may be replaced by a larger one.
    """
    spec = observed.job.spec
    if spec.elastic is None or spec.num_nodes is None:
        return Outlook()
    outlook = _evaluate_elastic(observed, state, spec.elastic, now, grow_after)
    return _with_release(outlook, observed, spec.num_nodes)


def build_probes(
    observed: Observed, outlook: Outlook, defaults: Defaults
) -> tuple[tuple[Apply, ...], ConditionUpdate | None]:
    """Return the missing probe pods, and the condition; it says why there are no probes."""
    if outlook.probes == 0:
        return (), outlook.condition
    applies, problem = missing_probes(observed, outlook.probes, defaults)
    condition = outlook.condition
    if problem and condition is not None:
        why = Reason(condition.why.reason, f"{condition.why.message} {sentence(problem)}")
        condition = replace(condition, why=why)
    return applies, condition


def _evaluate_elastic(
    observed: Observed, state: State, elastic: Elastic, now: datetime, grow_after: timedelta
) -> Outlook:
    job, gang = observed.job, observed.gang
    num_nodes = job.spec.num_nodes
    assert num_nodes is not None, "elastic goes with numNodes"
    child = gang.current_job
    nodes = head_and_workers.nodes_of(child)
    admitted_nodes = admission_status.node_limit(job, observed.queue)
    is_admitted = admitted_nodes is None or num_nodes <= admitted_nodes
    if is_admitted and num_nodes not in (nodes, head_and_workers.requested_nodes(child)):
        message = (
            f"Resizing from {nodes} to {count_of(num_nodes, 'node')}, as spec.numNodes was changed."
            " Training continues from the latest checkpoint."
        )
        return Outlook(nodes=num_nodes, why=Reason(BY_THE_USER, message))
    if child.spec.suspend:
        return Outlook()
    if state is State.GANG_STARTING and count_scheduled(gang.workers) < nodes:
        return _evaluate_starting(job, gang, observed.cluster.nodes, nodes, elastic.min_nodes, now)
    if nodes == num_nodes:
        return Outlook(condition=_condition("True", "AllNodes", f"{_size(nodes, num_nodes)}."))
    if admitted_nodes is not None and admitted_nodes <= nodes:
        message = (
            f"{_size(nodes, num_nodes)}. Waiting for the queue to admit more. See the condition"
            " Admitted."
        )
        return Outlook(condition=_condition("False", admission_status.WAITING, message))
    if state is State.GANG_RUNNING:
        target = num_nodes if admitted_nodes is None else min(num_nodes, admitted_nodes)
        return _evaluate_growth(gang, nodes, target, now, grow_after)
    message = f"{_size(nodes, num_nodes)}. Waiting for capacity."
    return Outlook(condition=_condition("False", "WaitingForCapacity", message))


def _with_release(outlook: Outlook, observed: Observed, num_nodes: int) -> Outlook:
    """Report that the gang does not use the nodes that the coordinator asks back.

    Other jobs wait for this report, so it comes before everything else about the size.
    """
    job, nodes = observed.job, head_and_workers.nodes_of(observed.gang.current_job)
    limit = admission_status.node_limit(job, observed.queue)
    if limit is None or nodes > limit or not admission_status.is_releasing_nodes(job):
        return outlook
    message = f"{_size(nodes, num_nodes)}. The other admitted nodes are released to waiting jobs."
    condition = _condition("False", admission_status.GIVES_BACK, message)
    return replace(outlook, condition=condition)


def _size(nodes: int, num_nodes: int) -> str:
    return f"The gang has {nodes} of {count_of(num_nodes, 'node')}"


def _condition(status: ConditionStatus, reason: str, message: str) -> ConditionUpdate:
    return ConditionUpdate(admission_status.FULL_SIZE, status, Reason(reason, message))


def nodes_of_next_gang(observed: Observed, last_gang: ObservedGang | None) -> int | None:
    """Return the nodes of the gang after `last_gang`, if there was one; None: as the spec has them.

    A smaller gang stays so after a failure, unless minNodes was raised. Nodes that are not admitted
    yet are added later.
    """
    job, spec = observed.job, observed.job.spec
    if spec.elastic is None or spec.num_nodes is None:
        return None
    nodes = spec.num_nodes
    if last_gang is not None and head_and_workers.requested_nodes(last_gang.current_job) == nodes:
        nodes = max(head_and_workers.nodes_of(last_gang.current_job), spec.elastic.min_nodes)
    limit = admission_status.node_limit(job, observed.queue)
    return nodes if limit is None or limit < spec.elastic.min_nodes else min(nodes, limit)


def _evaluate_starting(
    job: TorchrunJob,
    gang: ObservedGang,
    cluster_nodes: Mapping[str, Node] | None,
    nodes: int,
    min_nodes: int,
    now: datetime,
) -> Outlook:
    """Decide on a gang with pods without a node: wait, then shrink to the pods that have one."""
    if any(find_loss(cluster_nodes, pod, now) is None for pod in gang.stale_pods):
        message = "Waiting for pods of the previous attempt to release their nodes."
        return Outlook(condition=_condition("Unknown", "WaitingForOldGang", message))
    scheduled_count = count_scheduled(head_and_workers.alive_workers(gang))
    if scheduled_count < min_nodes:
        message = f"The gang needs at least {count_of(min_nodes, 'node')} (elastic.minNodes)."
        return Outlook(condition=_condition("False", "NodesMissing", message))
    deadline = _scheduling_since(job, gang, now) + SHRINK_AFTER
    if deadline <= now:
        seconds = SHRINK_AFTER.total_seconds()
        message = (
            f"Shrinking from {nodes} to {count_of(scheduled_count, 'node')}. After {seconds:.0f} s,"
            f" {pods_are(scheduled_count, nodes)} scheduled."
        )
        return Outlook(nodes=scheduled_count, why=Reason(SHRINKING, message))
    message = (
        f"The gang shrinks to {count_of(scheduled_count, 'node')} unless all {nodes} pods are"
        f" scheduled by {deadline:%H:%M:%S} UTC."
    )
    return Outlook(
        condition=_condition("False", "NodesMissing", message),
        requeue_after=_until(deadline, now),
    )


def _scheduling_since(job: TorchrunJob, gang: ObservedGang, now: datetime) -> datetime:
    """Return since when the scheduler could find nodes for the rest of the gang, but did not.

    That is the last time that a pod got a node, or that a pod of an older gang left its node,
    according to the condition. Before the first pod gets a node, the gang may have waited for long
    for room, or for Kueue. A pod that replaces another one is new.
    """
    since = max(
        gang.current_job.metadata.creation_timestamp or now,
        *(_replaced_at(pod) for pod in gang.workers),
        *(_placed_at(pod, _EARLIEST) for pod in gang.workers),
    )
    full_size = find_condition(job.status.conditions, admission_status.FULL_SIZE)
    if full_size is None or full_size.status == "True" or full_size.last_transition_time is None:
        return since
    return now if full_size.status == "Unknown" else max(since, full_size.last_transition_time)


def _replaced_at(pod: Pod) -> datetime:
    """Return the creation of a pod that replaces another one and has no node."""
    is_new = predecessors_of(pod) > 0 and not pod.spec.node_name
    return (pod.metadata.creation_timestamp if is_new else None) or _EARLIEST


def _evaluate_growth(
    gang: ObservedGang, nodes: int, target: int, now: datetime, grow_after: timedelta
) -> Outlook:
    """Ask the scheduler for room, and resize by the number of probes that have a node.

    Each growth costs as much as a restart, so the gang must have the age `grow_after`.
    """
    size_text = f"{_size(nodes, target)}. Waiting for capacity."
    probe_time = (gang.current_job.metadata.creation_timestamp or now) + grow_after
    if probe_time > now:
        message = f"{size_text} Probes for more nodes start at {probe_time:%H:%M:%S} UTC."
        condition = _condition("False", "WaitingForCapacity", message)
        return Outlook(condition=condition, requeue_after=_until(probe_time, now))
    probes = min(target - nodes, MOST_PROBES)
    placed = [_placed_at(pod, now) for pod in gang.probes if pod.spec.node_name and _is_usable(pod)]
    message = f"{size_text} Probe pods request {count_of(probes, 'more node')}."
    condition = _condition("False", "WaitingForCapacity", message)
    seconds_left = _until(min(placed) + SETTLE, now) if placed else None
    if len(placed) < probes and (seconds_left is None or seconds_left > 0):
        return Outlook(
            nodes=nodes + probes,
            why=Reason(GROWING, message),
            condition=condition,
            probes=probes,
            requeue_after=seconds_left,
        )
    new_nodes = nodes + min(len(placed), probes)
    message = (
        f"Growing from {nodes} to {count_of(new_nodes, 'node')}."
        f" Capacity for {count_of(len(placed), 'more node')} is available."
    )
    return Outlook(nodes=new_nodes, why=Reason(GROWING, message), condition=condition)


def _is_usable(pod: Pod) -> bool:
    return alive(pod) and not pod.metadata.terminating


def _placed_at(pod: Pod, default: datetime) -> datetime:
    """Return when the pod got its node; `default` if it has none, or if the time is unknown."""
    scheduled = find_condition(pod.status.conditions, "PodScheduled")
    if scheduled is None or scheduled.status != "True" or scheduled.last_transition_time is None:
        return default
    return scheduled.last_transition_time


def _until(moment: datetime, now: datetime) -> float:
    return (moment - now).total_seconds()


def delete_leftovers(
    job: TorchrunJob, gang: ObservedGang, probes: int = 0, deletes: tuple[Delete, ...] = ()
) -> tuple[Delete, ...]:
    """Delete gangs that a resize replaced, and all but `probes` probes, unless in `deletes`."""
    resized_deletes = (delete_job(child) for child in resized_jobs(job, gang))
    probe_deletes = (
        delete_pod(pod)
        for number, pod in enumerate(sorted(gang.probes, key=lambda p: p.metadata.name))
        if (number >= probes or not alive(pod)) and not pod.metadata.terminating
    )
    uids = {delete.uid for delete in deletes}
    return tuple(delete for delete in (*resized_deletes, *probe_deletes) if delete.uid not in uids)
