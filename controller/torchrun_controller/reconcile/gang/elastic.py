"""Elastic jobs: a smaller gang while machines are missing, and spec.numNodes again later.

Users set spec.numNodes (`kubectl scale`, within minNodes and maxNodes). A gang that cannot be
scheduled whole for a while is replaced by a gang of as many workers as have a machine, at least
minNodes. The gangs after it have that size as well, so that they do not wait for missing machines;
those created ASK_AGAIN_AFTER later ask for numNodes. A gang that runs is never replaced by a larger
one unless the user asks for that. Each resize is a new gang that goes on from the checkpoint. It
counts neither as a restart nor as a disruption.
"""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta

from msgspec import Struct

from torchrun_api.kinds.core import Node, Pod
from torchrun_api.kinds.job import Elastic, TorchrunJob
from torchrun_api.kinds.meta import ConditionStatus
from torchrun_api.kinds.status import Attempt
from torchrun_controller.reconcile.gang.gang import BY_THE_USER, SHRINKING, has_new_spec
from torchrun_controller.reconcile.model.conditions import ConditionUpdate, Reason, find_condition
from torchrun_controller.reconcile.model.messages import count_of, pods_are, sentence
from torchrun_controller.reconcile.model.observed import Observed, ObservedGang
from torchrun_controller.reconcile.model.phases import State
from torchrun_controller.reconcile.model.times import whole_attempts
from torchrun_controller.reconcile.pods import head_and_workers
from torchrun_controller.reconcile.pods.lifecycle import alive, count_scheduled
from torchrun_controller.reconcile.pods.nodes import NODES_RETRY, NOT_READ, find_loss
from torchrun_controller.reconcile.spec import admission_status
from torchrun_controller.reconcile.spec.errors import InvalidSpecError
from torchrun_controller.reconcile.spec.resolve import resolve
from torchrun_controller.reconcile.spec.validation import validate

# Time for the scheduler to find machines for a whole gang, before a smaller one is created.
SHRINK_AFTER = timedelta(seconds=30)
# Time from a shrink until new gangs ask for numNodes again.
ASK_AGAIN_AFTER = timedelta(hours=1)
FULL_SIZE = "FullSize"  # the condition on the size of an elastic job
_EARLIEST = datetime.min.replace(tzinfo=UTC)


class GangSize(Struct, frozen=True):
    """The nodes of a new gang. `shrunk_from` is numNodes if fewer are asked for: some are missing.

    Without it, a gang that has fewer nodes than numNodes waits for their admission.
    """

    nodes: int
    shrunk_from: int | None = None


class Outlook(Struct, frozen=True, kw_only=True):
    """The decision on the size of a gang: a resize and why, or a condition and a wait."""

    size: GangSize | None = None
    why: Reason | None = None
    condition: ConditionUpdate | None = None
    requeue_after: float | None = None


def evaluate_size(observed: Observed, state: State, now: datetime) -> Outlook:
    """Decide on the size of a gang in this state; no decision unless the job is elastic."""
    outlook = _evaluate(observed, state, now)
    if outlook.size is not None and observed.cluster.nodes_awaited:
        # The next gang would wait for them.
        message = "The controller has not read the machines yet. The gang is resized once it has."
        return Outlook(condition=_condition("False", NOT_READ, message), requeue_after=NODES_RETRY)
    return outlook


def _evaluate(observed: Observed, state: State, now: datetime) -> Outlook:
    job, gang = observed.job, observed.gang
    elastic, num_nodes = job.spec.elastic, job.spec.num_nodes
    if elastic is None or num_nodes is None:
        return Outlook()
    child = gang.current_job
    nodes = head_and_workers.nodes_of(child)
    obstacle = None
    if num_nodes not in (nodes, head_and_workers.requested_nodes(child)):
        obstacle = _find_obstacle(observed)
        if obstacle is None:
            message = (
                f"Resizing from {nodes} to {count_of(num_nodes, 'node')}, as spec.numNodes was"
                " changed. Training continues from the latest checkpoint."
            )
            return Outlook(size=GangSize(num_nodes), why=Reason(BY_THE_USER, message))
    if child.spec.suspend:
        return Outlook()
    if state is State.GANG_STARTING and count_scheduled(gang.workers) < nodes:
        return _evaluate_starting(job, gang, observed.cluster.nodes, nodes, elastic, now)
    text = f"The gang has {nodes} of {count_of(num_nodes, 'node')}."
    if nodes == num_nodes:
        return Outlook(condition=_condition("True", "AllNodes", text))
    if obstacle is not None:
        return Outlook(condition=_condition("False", obstacle.reason, f"{text} {obstacle.message}"))
    return Outlook(condition=_condition("False", "Shrunk", f"{text} {_describe_next(job)}"))


def _describe_next(job: TorchrunJob) -> str:
    shrunk_at = _last_shrink(job.status.attempts)
    if shrunk_at is None:
        return "The next gang asks for all of them."
    return (
        f"A new gang asks for all of them from {shrunk_at + ASK_AGAIN_AFTER:%H:%M:%S} UTC on."
        " To ask earlier, suspend and resume the job."
    )


def _find_obstacle(observed: Observed) -> Reason | None:
    """Return why no gang of spec.numNodes could follow the present one; None if one could."""
    job, queue = observed.job, observed.queue
    if queue is None:
        return Reason("QueueNotFound", f"TorchrunQueue {job.spec.job_queue} does not exist.")
    try:
        if queue.invalid:
            raise InvalidSpecError(
                f"TorchrunQueue {queue.metadata.name} is invalid: {queue.invalid}"
            )
        if has_new_spec(job, observed.gang):
            validate(job, queue)
    except InvalidSpecError as error:
        return Reason("InvalidSpec", sentence(str(error)))
    why = admission_status.check_admission(job, queue, resolve(job, queue).size)
    if why is None:
        return None
    return Reason(why.reason, "Waiting for the queue to admit more. See the condition Admitted.")


def _condition(status: ConditionStatus, reason: str, message: str) -> ConditionUpdate:
    return ConditionUpdate(FULL_SIZE, status, Reason(reason, message))


def size_of_next_gang(
    observed: Observed, last_gang: ObservedGang | None, now: datetime
) -> GangSize | None:
    """Return the size of the gang after `last_gang`, if there was one; None: as the spec has it.

    Nodes that are not admitted yet are added later.
    """
    job, num_nodes = observed.job, observed.job.spec.num_nodes
    if job.spec.elastic is None or num_nodes is None:
        return None
    kept = num_nodes
    if last_gang is not None:
        kept = head_and_workers.nodes_to_ask(job.spec, last_gang.current_job)
    shrunk_at = _last_shrink(job.status.attempts)
    stays_shrunk = shrunk_at is not None and now < shrunk_at + ASK_AGAIN_AFTER
    asked = kept if stays_shrunk else num_nodes
    limit = admission_status.node_limit(job, observed.queue)
    if limit is not None:
        limit = min(limit, kept)  # the coordinator reduces the charge of a shrunk gang at any time
    if limit is not None and job.spec.elastic.min_nodes <= limit < asked:
        return GangSize(limit)
    return GangSize(asked, num_nodes if asked < num_nodes else None)


def _last_shrink(attempts: Iterable[Attempt]) -> datetime | None:
    """Return when the job shrank; None if that is longer ago than the status records."""
    ends = (end.end_time for end in whole_attempts(attempts) if end.reason == SHRINKING)
    return max((time for time in ends if time is not None), default=None)


def _evaluate_starting(
    job: TorchrunJob,
    gang: ObservedGang,
    cluster_nodes: Mapping[str, Node] | None,
    nodes: int,
    elastic: Elastic,
    now: datetime,
) -> Outlook:
    """Decide on a gang with pods without a machine: wait, then shrink to the pods that have one."""
    if any(find_loss(cluster_nodes, pod, now) is None for pod in gang.stale_pods):
        message = "Waiting for pods of the previous attempt to release their machines."
        return Outlook(condition=_condition("Unknown", "WaitingForOldGang", message))
    scheduled_count = count_scheduled(tuple(filter(alive, gang.workers)))
    if scheduled_count < elastic.min_nodes:
        message = (
            f"The gang needs at least {count_of(elastic.min_nodes, 'node')} (elastic.minNodes)."
        )
        return Outlook(condition=_condition("False", "NodesMissing", message))
    deadline = _scheduling_since(job, gang, now) + SHRINK_AFTER
    if deadline <= now:
        seconds = SHRINK_AFTER.total_seconds()
        message = (
            f"Shrinking from {nodes} to {count_of(scheduled_count, 'node')}. After {seconds:.0f} s,"
            f" {pods_are(scheduled_count, nodes)} scheduled."
        )
        size = GangSize(min(scheduled_count, elastic.max_nodes), job.spec.num_nodes)
        return Outlook(size=size, why=Reason(SHRINKING, message))
    message = (
        f"The gang shrinks to {count_of(scheduled_count, 'node')} unless all {nodes} pods are"
        f" scheduled by {deadline:%H:%M:%S} UTC."
    )
    return Outlook(
        condition=_condition("False", "NodesMissing", message),
        requeue_after=(deadline - now).total_seconds(),
    )


def _scheduling_since(job: TorchrunJob, gang: ObservedGang, now: datetime) -> datetime:
    """Return since when the scheduler could find machines for the rest of the gang, but did not.

    That is the last time that a pod got a machine, or that a pod of an older gang left its machine,
    according to the condition. Before the first pod gets a machine, the gang may have waited for
    long for room, or for Kueue.
    """
    created = gang.current_job.metadata.creation_timestamp or now
    since = max([created, *map(_placed_at, gang.workers)])
    full_size = find_condition(job.status.conditions, FULL_SIZE)
    if full_size is None or full_size.status == "True" or full_size.last_transition_time is None:
        return since
    return now if full_size.status == "Unknown" else max(since, full_size.last_transition_time)


def _placed_at(pod: Pod) -> datetime:
    """Return when the pod got its machine; the earliest time if it has none, or if unknown."""
    scheduled = find_condition(pod.status.conditions, "PodScheduled")
    if scheduled is None or scheduled.status != "True" or scheduled.last_transition_time is None:
        return _EARLIEST
    return scheduled.last_transition_time
