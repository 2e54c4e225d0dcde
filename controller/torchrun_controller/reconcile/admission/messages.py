"""The messages of admission: why a workload waits, for each reason, and why one is preempted."""

from datetime import datetime, timedelta
from fractions import Fraction
from math import inf

from torchrun_api.kinds.quantity import format_bytes, format_cpu
from torchrun_controller.reconcile.admission.model import (
    PendingReason,
    PendingStatus,
    Preemption,
)
from torchrun_controller.reconcile.admission.node_capacity import FreeCapacity
from torchrun_controller.reconcile.admission.quota import RESOURCES, cost_of
from torchrun_controller.reconcile.admission.snapshot import (
    AdmittedWorkload,
    PendingWorkload,
    QueueSnapshot,
    Snapshot,
)
from torchrun_controller.reconcile.model.messages import count_of, list_names

NAMES = 3  # most preempted workloads that a message names
_NOUNS = ("node", "GPU", "CPU", "memory", "job")


def behind_in_queue(queue: QueueSnapshot) -> PendingStatus:
    """Return the status of a workload that is not the head of its queue."""
    if queue.paused_reason:
        return PendingStatus("QueuePaused", queue.paused_reason)
    return PendingStatus("BehindInQueue", f"Waiting behind other jobs in queue {queue.name}.")


def exceeds_quota(workload: PendingWorkload, resource: int) -> PendingStatus:
    """Return the status if the quota is too small even with nothing in use."""
    limit = _amount(resource, workload.queue.quota.cohort.limit[resource])
    lacks = f"{_quota(workload)} is {limit} in total. Request less or increase the quota."
    return _status(workload, "ExceedsQuota", lacks)


def exceeds_nodes(workload: PendingWorkload, empty: FreeCapacity) -> PendingStatus:
    """Return the status if the workload does not fit on an empty cluster."""
    room = _room(workload, empty, in_total=True)
    largest = _describe_largest(workload, empty)
    lacks = (
        f"{room} They do not fit even on empty machines.{largest} Request smaller or fewer pods."
    )
    return _status(workload, "ExceedsNodes", lacks)


def waiting_for_unusable_nodes(workload: PendingWorkload, empty: FreeCapacity) -> PendingStatus:
    """Return the status if the workload fits only on machines that are not ready or cordoned."""
    room = _room(workload, empty, in_total=True)
    wait = (
        "The job waits for other machines, which are not ready or cordoned; see kubectl get nodes."
    )
    return _status(workload, "WaitingForNodes", f"{room} {wait}")


def insufficient_quota(workload: PendingWorkload, resource: int) -> PendingStatus:
    """Return the status with what the quota has left of the resource that falls short."""
    cohort = workload.queue.quota.cohort
    unused = max(0, cohort.limit[resource] - cohort.used[resource])
    limit = _amount(resource, cohort.limit[resource])
    lacks = f"{_quota(workload)} has {_amount(resource, unused)} of {limit} left."
    return _status(workload, "InsufficientQuota", lacks)


def waiting_for_turn(
    workload: PendingWorkload, head: PendingWorkload | None = None
) -> PendingStatus:
    """Return the status while the free machines are for others: for `head`, if that is known."""
    lacks = "Other waiting jobs come first."
    if head is not None:
        lacks = f"The machines are reserved for {head.workload.name} in queue {head.queue.name}."
    return _status(workload, "WaitingForTurn", lacks)


def waiting_for_nodes(
    workload: PendingWorkload, snapshot: Snapshot, latest_start: str = ""
) -> PendingStatus:
    """Return the status with the number of pods that the free machines have room for."""
    room = _room(workload, snapshot.free)
    if jobs := snapshot.unscheduled_jobs(workload.shape):
        room += (
            f" Pods without a machine come first, of jobs that need no admission:"
            f" {list_names(jobs, NAMES)}."
        )
    return _status(workload, "WaitingForNodes", room + latest_start)


def waiting_to_grow(workload: PendingWorkload, snapshot: Snapshot) -> PendingStatus:
    """Return the status of an admitted workload that asks for more nodes."""
    resource = workload.queue.quota.shortage(workload.usage)
    if resource is not None:
        return insufficient_quota(workload, resource)
    if snapshot.free.capacity(workload.shape) >= workload.workers:
        return waiting_for_turn(workload)
    return waiting_for_nodes(workload, snapshot)


def preempting(
    workload: PendingWorkload, preempted_workloads: list[AdmittedWorkload]
) -> PendingStatus:
    """Return the status of a nominated workload: it waits for the machines of preempted ones."""
    uid = workload.workload.uid
    names = [
        admitted.workload.name for admitted in preempted_workloads if admitted.preempted_for == uid
    ]
    lacks = f"Waiting for preempted jobs to stop: {list_names(names, NAMES) or 'others'}."
    return _status(workload, "Preempting", lacks, nominated=True)


def describe_latest_start(now: datetime, seconds: float) -> str:
    """Describe when a reservation begins at the latest; "" if that is unknown."""
    if not 0 < seconds < inf:
        return ""
    return f" It starts by {now + timedelta(seconds=seconds):%Y-%m-%dT%H:%MZ} at the latest."


def explain_preemption(target: AdmittedWorkload, head: PendingWorkload) -> Preemption:
    """Return why a workload has to stop."""
    lost = describe_loss(target)
    winner, queue = f"{head.workload.namespace}/{head.workload.name}", head.queue
    uid, for_uid = target.workload.uid, head.workload.uid
    if target.queue is queue:
        message = (
            f"Preempted for {winner}, whose priority {head.workload.priority} is higher than"
            f" {target.workload.priority}.{lost}"
        )
        return Preemption(uid=uid, for_uid=for_uid, reason="HigherPriority", message=message)
    message = (
        f"Preempted to return quota borrowed in cohort {queue.queue.cohort}: queue {queue.name}"
        f" needs it for {winner}.{lost}"
    )
    return Preemption(uid=uid, for_uid=for_uid, reason="Reclaimed", message=message)


def describe_loss(target: AdmittedWorkload) -> str:
    """Return what a workload loses if it stops now, as a further sentence; "" if it has not run."""
    workload = target.workload
    ran, unsaved = workload.ran_seconds, workload.unsaved_seconds
    seconds = ran if unsaved is None else unsaved
    if not ran:
        return ""
    minutes = round(seconds * cost_of(target.usage) / 60)
    unit = "GPU minute" if target.usage[1] else "node minute"
    amount = f"about {minutes:,} {unit}s" if minutes > 1 else f"at most one {unit}"
    if unsaved is None:
        return f" It loses {amount}, unless it has saved a checkpoint: it reports none."
    what = "since" if unsaved < ran else "since it resumed from"
    return f" It loses {amount} {what} its checkpoint of step {workload.saved_step}."


def _status(
    workload: PendingWorkload, reason: PendingReason, lacks: str, *, nominated: bool = False
) -> PendingStatus:
    """Return the status of a workload: what it needs, and what it lacks."""
    more_text = " more" if workload.workload.admitted else ""
    needs = _amount(0, workload.pods)
    if gpus := workload.usage[1]:
        needs = f"{_amount(1, gpus)} on {needs}"
    return PendingStatus(reason, f"The job needs {needs}{more_text}. {lacks}", nominated=nominated)


def _room(workload: PendingWorkload, free: FreeCapacity, *, in_total: bool = False) -> str:
    """Describe how many of its pods fit onto the machines that it may use.

    `in_total` counts the pods that a growing workload has, too.
    """
    requested, workers = workload.pods, workload.workers
    if in_total:
        requested = workload.workload.nodes
        workers = workload.workload.workers(requested)
    pods = min(workers, free.capacity(workload.shape))
    suffix = " in addition to the head" if requested > workers else ""
    selector = sorted(workload.workload.node_selector.items())
    selector_text = ",".join(f"{key}={value}" for key, value in selector)
    which = f"with {selector_text}" if selector_text else "that are ready"
    return f"Machines {which} have room for {pods} of {count_of(workers, 'pod')}{suffix}."


def _describe_largest(workload: PendingWorkload, empty: FreeCapacity) -> str:
    """Describe the first resource of which a pod requests more than any machine has; "" if none."""
    for name, amount in sorted(workload.workload.pod.items()):
        largest = empty.nodes.largest(workload.shape, name)
        if amount > largest:
            requested, offered = (_quantity(name, number) for number in (amount, largest))
            return f" A pod requests {requested} of {name}; the largest machine offers {offered}."
    return ""


def _quantity(resource: str, amount: int) -> str:
    if resource == "cpu":
        return format_cpu(Fraction(amount, 1000))
    return format_bytes(Fraction(amount)) if resource == "memory" else str(amount)


def _quota(workload: PendingWorkload) -> str:
    cohort = workload.queue.queue.cohort
    return (
        f"The quota of cohort {cohort}" if cohort else f"The quota of queue {workload.queue.name}"
    )


def _amount(resource: int, amount: int) -> str:
    """Format an amount of one of RESOURCES with its unit."""
    if RESOURCES[resource] == "memory":
        return f"{format_bytes(Fraction(amount))} of memory"
    number = format_cpu(Fraction(amount, 1000)) if RESOURCES[resource] == "cpu" else str(amount)
    return count_of(number, _NOUNS[resource])
