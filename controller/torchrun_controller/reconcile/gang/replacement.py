"""Replacement of single pods: the Job controller replaces a lost pod, and the others keep theirs.

A gang goes on only if each lost pod is proven to have stopped. The status records its end before
the gate of the new pod opens. In any doubt the gang ends and a new one follows, as without
replacement. See docs/decisions/0011-replacement-of-single-pods.md.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta

from msgspec import Struct

from torchrun_api import names
from torchrun_api.core import Job, Pod
from torchrun_api.job import TorchrunJob
from torchrun_api.status import Attempt, LastFailure, LostPod
from torchrun_controller.reconcile.gang import fence
from torchrun_controller.reconcile.gang.failures import (
    LAUNCHER_DISRUPTIONS,
    POD_DELETED,
    POD_VERDICTS,
    Failure,
    failure_of,
    precedence,
)
from torchrun_controller.reconcile.gang.lost_pods import find_records, record_before
from torchrun_controller.reconcile.model.attempts import find_end
from torchrun_controller.reconcile.model.observed import Observed, ObservedGang
from torchrun_controller.reconcile.pods import head_and_workers
from torchrun_controller.reconcile.pods.lifecycle import (
    alive,
    attempt_of,
    count_scheduled,
    has_own_start,
    index_of,
    predecessors_of,
    stopped,
    waits_for_predecessor,
)

# The reason of a gang that ends because a lost pod, which the status has, is not replaced.
NOT_REPLACED = "NotReplaced"
# After the grace period of a pod that is deleted, for its kubelet to report the end.
END_WITHIN = timedelta(seconds=60)
# From the end of a pod until the one that replaces it runs. The Job controller waits 10 s, 20 s and
# then 40 s of them.
REPLACE_WITHIN = timedelta(seconds=240)
# For the scheduler to find a node for the new pod, before a new gang may find one on other nodes.
SCHEDULE_WITHIN = timedelta(seconds=30)
# For the delays between the waits above. A controller that is down for longer does not decide: the
# launchers end the gang.
_RESERVE = timedelta(seconds=30)
# Losses of one index in a gang. After the next one the Job controller would wait for 80 s.
MOST_OF_INDEX = 3
# Pods that are replaced at the same time. The status must not lose one of their ends.
MOST_AT_ONCE = 5
# Of an Indexed Job. A user can set the label to any number.
_LARGEST_INDEX = 10_000


class Loss(Struct, frozen=True):
    """A pod that was lost, and is proven to have stopped."""

    pod: Pod
    failure: Failure


class Losses(Struct, frozen=True, kw_only=True):
    """The lost pods of a gang that replaces them.

    `new` are those that the status does not have. `pending` are the newest pods of the indexes that
    wait for the end of a pod, or for a new one to run. `goes_on` is False if the gang is to end;
    `problem` is why if no pod has failed. `peer_cause` is why other pods lose their peers.
    `deadline` is when the next wait is over.
    """

    new: tuple[Loss, ...] = ()
    pending: tuple[Pod, ...] = ()
    goes_on: bool = True
    problem: Failure | None = None
    peer_cause: Failure | None = None
    deadline: datetime | None = None

    @property
    def since(self) -> datetime | None:
        """When the first of the new losses happened."""
        times = (loss.failure.details.time for loss in self.new)
        return min((time for time in times if time is not None), default=None)


class _Verdict(Struct, frozen=True, kw_only=True):
    """What the newest pod of an index means for its gang; see `Losses`.

    `failure` is why a pod was lost that the status does not have.
    """

    loss: Loss | None = None
    failure: Failure | None = None
    is_pending: bool = False
    ends_gang: bool = False
    problem: Failure | None = None
    deadline: datetime | None = None


_FINE = _Verdict()
_END = _Verdict(ends_gang=True)


def launcher_seconds(grace_seconds: int) -> int:
    """Return how long the launchers wait for the replacement of a pod with this grace period."""
    waits = END_WITHIN + REPLACE_WITHIN + _RESERVE
    return grace_seconds + int(waits.total_seconds())


def is_replacing(child: Job) -> bool:
    """Whether the Job controller replaces lost pods of this Job."""
    asks = child.metadata.annotations.pod_replacement == names.POD
    return asks and child.spec.backoff_limit != 0


def recorded_uids(job: TorchrunJob, gang: ObservedGang) -> frozenset[str]:
    """Return the UIDs of the lost pods of the present gang that the status has."""
    return frozenset(map(_uid_of, find_records(job, gang)))


def find_awaited(job: TorchrunJob, gang: ObservedGang) -> tuple[Pod, ...]:
    """Return the pods of the present gang whose end, replacement or start it may wait for."""
    if not gang.child_jobs or not is_replacing(gang.current_job):
        return ()
    lost = recorded_uids(job, gang)
    return tuple(pod for pod in gang.workers if pod.metadata.uid in lost or _is_awaited(pod))


def _is_awaited(pod: Pod) -> bool:
    is_new = predecessors_of(pod) > 0
    runs = pod.status.phase == "Running" and has_own_start(pod)
    return alive(pod) and (pod.metadata.terminating or (is_new and not runs))


def is_proven(pod: Pod, records: Iterable[Attempt]) -> bool:
    """Whether no rank of an earlier pod of this index may run, by the pod's gate or the records."""
    return not waits_for_predecessor(pod) or record_before(pod, records) is not None


def find_open_records(job: TorchrunJob, gang: ObservedGang) -> tuple[Attempt, ...]:
    """Return the recorded losses since the last start of a round.

    They count once together, as the failures of the pods of a gang do.
    """
    return select_open_records(gang, find_records(job, gang))


def select_open_records(gang: ObservedGang, records: Iterable[Attempt]) -> tuple[Attempt, ...]:
    """Return the record of each index that has no pod yet that may start. The status keeps them."""
    records = tuple(records)
    uids = {_uid_of(end): end for end in records}
    open_records = []
    for pod in gang.workers:
        record = uids.get(pod.metadata.uid)
        if record is None and waits_for_predecessor(pod):
            record = record_before(pod, records)
        if record is not None:
            open_records.append(record)
    return tuple(open_records)


def to_record(loss: Loss, now: datetime, running_seconds: float, *, counted: bool) -> Attempt:
    """Return the end of a lost pod for the status."""
    pod, details = loss.pod, loss.failure.details
    return Attempt(
        number=attempt_of(pod),
        lost_pod=LostPod(uid=pod.metadata.uid, index=index_of(pod), replaced=predecessors_of(pod)),
        node=pod.spec.node_name,
        start_time=pod.metadata.creation_timestamp,
        end_time=now,
        running_seconds=round(running_seconds),
        counted=counted,
        reason=details.reason,
        message=details.message[:512],
    )


def find_losses(observed: Observed, now: datetime) -> Losses | None:
    """Return the lost pods of the present gang; None if it does not replace pods, or has ended."""
    job, gang, cluster = observed.job, observed.gang, observed.cluster
    child = gang.current_job
    is_stopped = child.spec.suspend or child.metadata.terminating
    if is_stopped or not is_replacing(child) or head_and_workers.find_failed_job(gang) is not None:
        return None
    if find_end(job.status.attempts, attempt_of(child)) is not None:
        return None
    records = find_records(job, gang)
    may_shrink = _may_shrink(job, gang)
    workers = head_and_workers.pods_since_resumption(gang)
    verdicts = {
        pod.metadata.uid: _judge(pod, observed, records, now, may_shrink=may_shrink)
        for pod in workers
    }
    pending = tuple(pod for pod in workers if verdicts[pod.metadata.uid].is_pending)
    problems = [each.problem for each in verdicts.values() if each.problem is not None]
    has_succeeded = any(pod.status.phase == "Succeeded" for pod in workers)
    most = min(MOST_AT_ONCE, head_and_workers.nodes_of(child) - 1)
    ends = any(each.ends_gang for each in verdicts.values())
    # A pod is lost by the report of its kubelet alone, so nodes that are read soon are awaited.
    ends = ends or (cluster.nodes is None and not cluster.nodes_awaited)
    return Losses(
        new=tuple(each.loss for each in verdicts.values() if each.loss is not None),
        pending=pending,
        goes_on=not ends and not (pending and (has_succeeded or len(pending) > most)),
        problem=problems[0] if problems else None,
        peer_cause=_peer_cause(tuple(verdicts.values()), pending),
        deadline=min((v.deadline for v in verdicts.values() if v.deadline), default=None),
    )


def _may_shrink(job: TorchrunJob, gang: ObservedGang) -> bool:
    """Whether the gang becomes smaller if a new pod finds no node."""
    elastic = job.spec.elastic
    return (
        elastic is not None
        and count_scheduled(head_and_workers.alive_workers(gang)) >= elastic.min_nodes
    )


def _judge(
    pod: Pod,
    observed: Observed,
    records: tuple[Attempt, ...],
    now: datetime,
    *,
    may_shrink: bool,
) -> _Verdict:
    if fence.unproven_loss(observed.cluster.nodes, pod, now) is not None:
        return _END
    record = next((end for end in records if _uid_of(end) == pod.metadata.uid), None)
    if record is not None:
        return _wait_for_new_pod(pod, record, now)
    failure = failure_of(pod)
    if failure is not None:
        return _judge_failure(pod, failure, records, now)
    if predecessors_of(pod) == 0:
        return _FINE
    if not is_proven(pod, records):
        return _judge_predecessor(pod, observed.gang, records)
    if pod.status.phase in ("Running", "Succeeded") and has_own_start(pod):
        return _FINE
    return _wait_until_running(pod, record_before(pod, records), now, may_shrink=may_shrink)


def _uid_of(end: Attempt) -> str:
    return "" if end.lost_pod is None else end.lost_pod.uid


def _judge_failure(
    pod: Pod, failure: Failure, records: tuple[Attempt, ...], now: datetime
) -> _Verdict:
    # A pod that was lost is why its peers fail, also if it ends the gang.
    end = _Verdict(ends_gang=True, failure=failure if _is_loss(failure) else None)
    if not alive(pod):
        loss = _to_loss(pod, failure, records)
        return end if loss is None else _Verdict(is_pending=True, failure=failure, loss=loss)
    # It terminates. Its deletion timestamp is the end of its grace period.
    deadline = (pod.metadata.deletion_timestamp or now) + END_WITHIN
    return end if deadline <= now else _Verdict(is_pending=True, failure=failure, deadline=deadline)


def _judge_predecessor(pod: Pod, gang: ObservedGang, records: tuple[Attempt, ...]) -> _Verdict:
    """Judge a new pod by the pod that it replaces, which the status does not have."""
    place = index_of(pod), predecessors_of(pod) - 1
    predecessors = (p for p in gang.replaced_pods if (index_of(p), predecessors_of(p)) == place)
    for predecessor in predecessors:
        failure = failure_of(predecessor)
        loss = None if failure is None else _to_loss(predecessor, failure, records)
        if loss is not None:
            return _Verdict(is_pending=True, failure=failure, loss=loss)
    details = LastFailure(
        node=pod.spec.node_name,
        reason=POD_DELETED,
        message=f"The end of the pod before {pod.metadata.name} was not observed.",
        time=pod.metadata.creation_timestamp,
    )
    return _Verdict(ends_gang=True, problem=Failure(details=details, disruption=True))


def _to_loss(pod: Pod, failure: Failure, records: tuple[Attempt, ...]) -> Loss | None:
    """Return the loss of a pod that has ended; None if it is none, or not proven, or one too many.

    A pod that never had a node never ran.
    """
    has_stopped = stopped(pod) or (not pod.spec.node_name and not alive(pod))
    may_be_replaced = (
        predecessors_of(pod) < MOST_OF_INDEX
        and index_of(pod) <= _LARGEST_INDEX
        and is_proven(pod, records)
    )
    if has_stopped and may_be_replaced and _is_loss(failure):
        return Loss(pod, failure)
    return None


def _is_loss(failure: Failure) -> bool:
    """Whether the pod was lost, and did not fail because of its command or its launcher."""
    reason = failure.details.reason
    if reason == "NodeLost" or reason in LAUNCHER_DISRUPTIONS:
        return False
    return failure.disruption or reason in POD_VERDICTS


def _wait_for_new_pod(pod: Pod, record: Attempt, now: datetime) -> _Verdict:
    """Wait until the Job controller has created the next pod of this index."""
    deadline = (record.end_time or now) + REPLACE_WITHIN
    if deadline <= now:
        seconds = REPLACE_WITHIN.total_seconds()
        return _not_replaced(pod, f"was not replaced within {seconds:.0f} s")
    return _Verdict(is_pending=True, deadline=deadline)


def _wait_until_running(
    pod: Pod, record: Attempt | None, now: datetime, *, may_shrink: bool
) -> _Verdict:
    """Wait for a new pod to get a node and to run."""
    creation_time = pod.metadata.creation_timestamp or now
    since = creation_time if record is None or record.end_time is None else record.end_time
    deadline = since + REPLACE_WITHIN
    if deadline <= now:
        return _not_replaced(pod, f"did not run within {REPLACE_WITHIN.total_seconds():.0f} s")
    if not (pod.spec.node_name or may_shrink):
        deadline = min(deadline, creation_time + SCHEDULE_WITHIN)
    if deadline <= now:
        return _not_replaced(pod, f"found no node within {SCHEDULE_WITHIN.total_seconds():.0f} s")
    return _Verdict(is_pending=True, deadline=deadline)


def _not_replaced(pod: Pod, what: str) -> _Verdict:
    problem = _counted_failure(pod, f"Pod {pod.metadata.name} {what}.")
    return _Verdict(is_pending=True, ends_gang=True, problem=problem)


def _counted_failure(pod: Pod, message: str) -> Failure:
    details = LastFailure(node=pod.spec.node_name, reason=NOT_REPLACED, message=message)
    return Failure(details=details, disruption=True, is_counted=True)


def _peer_cause(verdicts: tuple[_Verdict, ...], pending: tuple[Pod, ...]) -> Failure | None:
    """Return the loss for which other pods lose their peers; None if no pod is lost."""
    new_failures = [v.failure for v in verdicts if v.failure is not None]
    if new_failures:
        return min(new_failures, key=lambda failure: precedence(failure.details))
    if not pending:
        return None
    name = pending[0].metadata.name
    return _counted_failure(pending[0], f"The other pods did not wait for the loss of pod {name}.")
