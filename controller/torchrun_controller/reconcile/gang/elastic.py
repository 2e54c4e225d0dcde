"""Elastic jobs: fewer nodes where some are missing, the wanted number when they are back.

Wanted is spec.numNodes, by the user's word (`kubectl scale`, within minNodes and maxNodes). A gang
that cannot be placed whole for a while is made anew of as many workers as have a node, minNodes at
least. Whether there is room again is never guessed from what nodes have: probe pods with the
requests and constraints of a worker ask the scheduler. Each resize is a new gang that goes on from
the checkpoint; it is no restart and no disruption.
"""

from datetime import datetime, timedelta

from msgspec import Struct
from msgspec.structs import replace

from torchrun_api import names
from torchrun_api.core import Job, Pod
from torchrun_api.job import Elastic, TorchrunJob
from torchrun_api.meta import ConditionStatus
from torchrun_controller.reconcile.gang import gang
from torchrun_controller.reconcile.gang.probe import missing_probes
from torchrun_controller.reconcile.model.conditions import ConditionUpdate, Reason, find_condition
from torchrun_controller.reconcile.model.observed import Defaults, Observed
from torchrun_controller.reconcile.model.phases import State
from torchrun_controller.reconcile.model.plan import Apply, Delete
from torchrun_controller.reconcile.pods import head_and_workers
from torchrun_controller.reconcile.pods.lifecycle import alive, count_scheduled, delete_pod
from torchrun_controller.reconcile.pods.nodes import find_loss
from torchrun_controller.reconcile.spec import admission_status

# For the scheduler to find nodes for a whole gang, before a smaller one is made.
SHRINK_AFTER = timedelta(seconds=30)
# From the first probe that finds room: what comes back together is taken in together.
SETTLE = timedelta(seconds=10)
MOST_PROBES = 16


class Outlook(Struct, frozen=True, kw_only=True):
    """What follows for the size of a gang: a resize to `nodes`, or what it says and waits for."""

    nodes: int | None = None
    why: Reason | None = None  # of the resize
    condition: ConditionUpdate | None = None
    probes: int = 0
    requeue_after: float | None = None


def outlook(observed: Observed, state: State, now: datetime, grow_after: timedelta) -> Outlook:
    """What the size of a gang calls for that is in this state; nothing unless it is elastic."""
    spec = observed.job.spec
    if spec.elastic is None or spec.num_nodes is None:
        return Outlook()
    return _outlook(observed, state, spec.elastic, now, grow_after)


def probes(
    observed: Observed, outlook: Outlook, defaults: Defaults
) -> tuple[tuple[Apply, ...], ConditionUpdate | None]:
    """The probe pods that are missing, and the condition with the reason why there are none."""
    applies, problem = missing_probes(observed, outlook.probes, defaults)
    condition = outlook.condition
    if problem and condition is not None:
        why = Reason(condition.why.reason, f"{condition.why.message}; {problem}")
        condition = replace(condition, why=why)
    return applies, condition


def _outlook(
    observed: Observed, state: State, elastic: Elastic, now: datetime, grow_after: timedelta
) -> Outlook:
    wanted = observed.job.spec.num_nodes
    assert wanted is not None, "elastic goes with numNodes"
    child = observed.gang.current_job
    nodes = head_and_workers.nodes_of(child)
    if wanted not in (nodes, asked_of(child)):
        why = Reason(gang.BY_THE_USER, f"from {nodes} to {wanted} nodes, from the checkpoint")
        return Outlook(nodes=wanted, why=why)
    if child.spec.suspend:
        return Outlook()
    if state is State.GANG_STARTING and count_scheduled(observed.gang.workers) < nodes:
        return _placing(observed, nodes, elastic.min_nodes, now)
    if nodes == wanted:
        return Outlook(condition=_condition("True", "AllNodes", f"{nodes} of {wanted} nodes"))
    most = admission_status.most_nodes(observed)
    if most is not None and most <= nodes:
        return Outlook(condition=_not_admitted(observed.job, nodes, wanted))
    if state is State.GANG_RUNNING:
        return _growing(
            observed, nodes, wanted if most is None else min(wanted, most), now, grow_after
        )
    message = f"{nodes} of {wanted} nodes, waits for capacity"
    return Outlook(condition=_condition("False", "WaitingForCapacity", message))


def _not_admitted(job: TorchrunJob, nodes: int, wanted: int) -> ConditionUpdate:
    """No room is looked for that the queue has not admitted."""
    short = f"{nodes} of {wanted} nodes"
    if admission_status.gives_back(job):
        message = f"{short}; gives back the others that it was admitted for to jobs that wait"
        return _condition("False", admission_status.GIVES_BACK, message)
    return _condition(
        "False", admission_status.WAITING, f"{short}, waits for its queue to admit more"
    )


def _condition(status: ConditionStatus, reason: str, message: str) -> ConditionUpdate:
    return ConditionUpdate(admission_status.FULL_SIZE, status, Reason(reason, message))


def asked_of(child: Job) -> int:
    """numNodes when the gang was made, which may be larger than the gang."""
    return names.number_in(
        child.metadata.annotations.wanted_nodes, head_and_workers.nodes_of(child)
    )


def kept(observed: Observed) -> int | None:
    """Nodes of the gang that follows a failure: a smaller gang stays so; None: as the spec says."""
    child, spec = observed.gang.current_job, observed.job.spec
    as_asked = spec.elastic is not None and asked_of(child) == spec.num_nodes
    return head_and_workers.nodes_of(child) if as_asked else None


def _placing(observed: Observed, nodes: int, fewest: int, now: datetime) -> Outlook:
    """Not every worker has a node: wait, then take what there is."""
    if any(find_loss(observed.cluster.nodes, pod, now) is None for pod in observed.gang.stale_pods):
        told = "workers of an earlier gang still hold their nodes"
        return Outlook(condition=_condition("Unknown", "WaitingForOldGang", told))
    placed = count_scheduled(observed.gang.workers)
    if placed < fewest:
        message = f"{placed} workers have a node, {fewest} are needed (elastic.minNodes)"
        return Outlook(condition=_condition("False", "NodesMissing", message))
    deadline = _placing_since(observed, now) + SHRINK_AFTER
    if deadline <= now:
        seconds = SHRINK_AFTER.total_seconds()
        message = f"{placed} of {nodes} workers found a node within {seconds:.0f} s"
        why = Reason(gang.SHRINKING, f"from {nodes} to {placed} nodes: {message}")
        return Outlook(nodes=placed, why=why)
    message = (
        f"a gang of {placed} follows unless all {nodes} have a node by {deadline:%H:%M:%S} UTC"
    )
    return Outlook(
        condition=_condition("False", "NodesMissing", message),
        requeue_after=_until(deadline, now),
    )


def _placing_since(observed: Observed, now: datetime) -> datetime:
    """Since when nothing of ours keeps the nodes from the gang, as the condition remembers it."""
    made = observed.gang.current_job.metadata.creation_timestamp or now
    known = find_condition(observed.job.status.conditions, admission_status.FULL_SIZE)
    if known is None or known.status == "True" or known.last_transition_time is None:
        return made
    return now if known.status == "Unknown" else max(made, known.last_transition_time)


def _growing(
    observed: Observed, nodes: int, wanted: int, now: datetime, grow_after: timedelta
) -> Outlook:
    """Ask the scheduler for room, not too often; resize by as much as it has found.

    `grow_after` is the age of a gang before it may give way to a larger one: each growth costs what
    a restart costs.
    """
    short = f"{nodes} of {wanted} nodes, waits for capacity"
    opening = (observed.gang.current_job.metadata.creation_timestamp or now) + grow_after
    if opening > now:
        message = f"{short}; room for more is looked for from {opening:%H:%M:%S} UTC on"
        condition = _condition("False", "WaitingForCapacity", message)
        return Outlook(condition=condition, requeue_after=_until(opening, now))
    probes = min(wanted - nodes, MOST_PROBES)
    placed = [pod for pod in observed.gang.probes if pod.spec.node_name and _stands(pod)]
    condition = _condition(
        "False", "WaitingForCapacity", f"{short}; probe pods ask the scheduler for {probes} more"
    )
    if not placed:
        return Outlook(condition=condition, probes=probes)
    settled = min(_placed_at(pod, now) for pod in placed) + SETTLE
    if len(placed) < probes and settled > now:
        return Outlook(condition=condition, probes=probes, requeue_after=_until(settled, now))
    larger = nodes + min(len(placed), probes)
    why = Reason(
        gang.GROWING, f"from {nodes} to {larger} nodes: there is room for {len(placed)} more"
    )
    return Outlook(nodes=larger, why=why)


def _stands(pod: Pod) -> bool:
    return alive(pod) and not pod.metadata.terminating


def _placed_at(pod: Pod, now: datetime) -> datetime:
    scheduled = find_condition(pod.status.conditions, "PodScheduled")
    return (scheduled.last_transition_time if scheduled is not None else None) or now


def _until(moment: datetime | None, now: datetime) -> float | None:
    return None if moment is None else (moment - now).total_seconds()


def leftovers(
    observed: Observed, wanted: int = 0, deletes: tuple[Delete, ...] = ()
) -> tuple[Delete, ...]:
    """Probes beyond those `wanted`, and gangs that a resize has left; without these `deletes`."""
    resized = (gang.delete(child) for child in gang.left_by_resize(observed))
    idle = (
        delete_pod(pod)
        for number, pod in enumerate(sorted(observed.gang.probes, key=lambda p: p.metadata.name))
        if (number >= wanted or not alive(pod)) and not pod.metadata.terminating
    )
    known = {delete.uid for delete in deletes}
    return tuple(delete for delete in (*resized, *idle) if delete.uid not in known)
