"""Unfenced workers: pods on lost machines that may still run and write the same checkpoints.

On a silent machine, a pod that is gone from the API may still run: the deletion of a Node object
removes its pods, and a forced deletion does not wait for the kubelet. `status.unfenced` has such a
worker from the start of NotReady on, until one of these holds:

- its machine is tainted out-of-service: an administrator has switched the machine off;
- its Node object is gone, and an annotation of the TorchrunJob says that the machine is off;
- its machine is Ready again and has the pod: from now on the kubelet reports its end;
- its machine has been Ready again for longer than a kubelet takes to end a deleted pod;
- its pod was deleted by force on a Ready machine, for as long ago;
- a newer gang that had to fence it reports that its ranks have started;
- the user allows an unfenced restart.

No gang is created before the status has all of them. `status.workerNodes` has the machines of the
present gang: it shows workers whose pods vanished while no controller ran.

With a shared state directory, the launchers of a new gang can fence such a worker
(torchrun_runtime.launch.fencing): its launcher has proved that it watches for newer gangs, and
kills its ranks. The worker stays in the status until they report that their ranks have started,
which they do after the fence. Launchers of later gangs know of the fence from the directory.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta

from msgspec import Struct
from msgspec.structs import replace

from torchrun_api import names
from torchrun_api.kinds.core import Node, Pod
from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.status import UnfencedWorker
from torchrun_controller.reconcile.gang.failures import UNPROVEN, read_failure
from torchrun_controller.reconcile.model.observed import ObservedCluster, ObservedGang
from torchrun_controller.reconcile.pods import head_and_workers, nodes
from torchrun_controller.reconcile.pods.lifecycle import (
    PodState,
    alive,
    attempt_of,
    follows_leader,
    has_own_start,
    index_of,
    state_of,
)
from torchrun_controller.reconcile.spec.reliability import ResolvedReliability

# Shown to users: from the start annotation until ranks start. The launchers wait for 45 s.
FENCE_SECONDS = 50
# Beyond a pod's grace period: for a kubelet that is back to end deleted pods.
RELEASE_DELAY = timedelta(seconds=30)


class BlockingPods(Struct, frozen=True):
    """Pods of older gangs that may still run, and unfenced workers, whose end is never reported."""

    pods: tuple[Pod, ...] = ()
    unfenced: tuple[UnfencedWorker, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.pods or self.unfenced)


def blocking_pods(
    gang: ObservedGang,
    cluster_nodes: Mapping[str, Node] | None,
    unfenced: tuple[UnfencedWorker, ...],
    attempt: int,
    now: datetime,
) -> BlockingPods:
    """Return what keeps the gate of this attempt closed; `unfenced` are all unfenced workers."""
    older_pods = [pod for pod in gang.stale_pods if alive(pod)]
    if not gang.child_jobs or attempt_of(gang.current_job) < attempt:
        older_pods += [pod for pod in gang.workers if alive(pod)]
    else:
        # From before a suspension, or deleted: then the gang is about to end.
        older_pods += [pod for pod in gang.workers if state_of(pod) is PodState.TERMINATING]
    return BlockingPods(
        tuple(pod for pod in older_pods if nodes.find_loss(cluster_nodes, pod, now) is None),
        tuple(worker for worker in unfenced if worker.attempt is None or worker.attempt < attempt),
    )


def unfenced_workers(
    job: TorchrunJob,
    gang: ObservedGang,
    cluster_nodes: Mapping[str, Node] | None,
    policy: ResolvedReliability,
    now: datetime,
) -> tuple[UnfencedWorker, ...]:
    """Return the workers for `status.unfenced`: those there that are not released, and new ones.

    A worker cannot train if neither it nor its leader has the annotation that starts ranks.
    """
    if policy.allow_unfenced_restart:
        return ()
    recorded = _recorded_workers(job, gang)
    recorded_identities = {_identity(worker) for worker in recorded}
    found = _find_workers(job, gang, cluster_nodes, now) if cluster_nodes is not None else ()
    new_workers = {_identity(worker): worker for worker in found}
    unrecorded = [
        worker for identity, worker in new_workers.items() if identity not in recorded_identities
    ]
    release_delay, machines_off = _release_delay(policy), _machines_off(job)
    executed_orders = _executed_orders(gang)
    return tuple(
        worker
        for worker in (*recorded, *sorted(unrecorded, key=_order))
        if not _is_released(job, gang, cluster_nodes, worker, now, release_delay, machines_off)
        if not any(has_worker(order, worker) for order in executed_orders)
    )


def has_unrecorded(job: TorchrunJob, unfenced: tuple[UnfencedWorker, ...]) -> bool:
    """Whether some of the unfenced workers are not in the status."""
    recorded_identities = {_identity(worker) for worker in job.status.unfenced}
    return any(_identity(worker) not in recorded_identities for worker in unfenced)


def worker_nodes(
    job: TorchrunJob,
    gang: ObservedGang,
    cluster: ObservedCluster,
    attempt: int,
    unfenced: tuple[UnfencedWorker, ...],
) -> tuple[str, ...]:
    """Return the machines of the workers of an attempt that may run ranks, by index; "" for none.

    The `unfenced` workers are left out: the status has them already. While machines are awaited,
    the status also keeps its machines: a pod that vanishes meanwhile may be on a lost one.
    """
    if cluster.nodes is None and not cluster.nodes_awaited:
        return ()
    recorded_identities = {_identity(worker) for worker in unfenced}
    may_train = _training(job, gang)
    is_kept = cluster.nodes is None and attempt == job.status.attempt
    node_names = dict(enumerate(job.status.worker_nodes if is_kept else ()))
    node_names |= {
        index_of(pod): pod.spec.node_name
        for pod in gang.pods
        if attempt_of(pod) == attempt
        and may_train(pod, False)
        and state_of(pod) is not PodState.STOPPED
        and not of_earlier_job(job, gang, pod)
        and (attempt, index_of(pod), pod.spec.node_name) not in recorded_identities
    }
    last = max(node_names, default=-1)
    return tuple(node_names.get(index, "") for index in range(last + 1))


def next_release(
    gang: ObservedGang,
    cluster_nodes: Mapping[str, Node] | None,
    policy: ResolvedReliability,
    unfenced: tuple[UnfencedWorker, ...],
    now: datetime,
) -> float | None:
    """Return the seconds until the next worker is released, if its machine stays Ready."""
    release_delay = _release_delay(policy)
    waits = [
        (since + release_delay - now).total_seconds()
        for worker in unfenced
        if (since := _ready_since(cluster_nodes, worker)) is not None
    ]
    fencing_start = fencing_since(gang)
    if fencing_start is not None:
        waits.append(FENCE_SECONDS - (now - fencing_start).total_seconds())
    return min((seconds for seconds in waits if seconds > 0), default=None)


def fencing_since(gang: ObservedGang) -> datetime | None:
    """Return when the present gang began to fence the gang before it; None if it need not.

    Older gangs were fenced by the gang before, or its launchers report that they were not.
    """
    if not gang.child_jobs:
        return None
    previous = attempt_of(gang.current_job) - 1
    annotations = (pod.metadata.annotations.fence.partition(" ") for pod in gang.workers)
    times = [parse_time(time) for time, _, who in annotations if f" {previous}:" in f" {who}"]
    return max((time for time in times if time is not None), default=None)


def _recorded_workers(job: TorchrunJob, gang: ObservedGang) -> tuple[UnfencedWorker, ...]:
    """Return the workers of the status, updated with what the present gang reports of them."""
    workers = job.status.unfenced
    if not gang.child_jobs or not workers:
        return workers
    attempt = attempt_of(gang.current_job)
    if any(read_failure(pod).reason == UNPROVEN for pod in gang.workers if not alive(pod)):
        return tuple(
            replace(w, unproven=True) if w.attempt is None or w.attempt < attempt else w
            for w in workers
        )
    return workers


def _find_workers(
    job: TorchrunJob, gang: ObservedGang, cluster_nodes: Mapping[str, Node], now: datetime
) -> Iterator[UnfencedWorker]:
    """Yield the workers that may run ranks, and whose end no kubelet is going to report.

    The kubelet reports the end of all containers before it removes a pod. `kubectl delete --force`
    removes it at once, and the containers keep what is left of their grace period.
    """
    may_train = _training(job, gang)

    def worker(pod: Pod, since: datetime) -> UnfencedWorker:
        attempt = _attempt_in_job(job, gang, pod)
        return UnfencedWorker(
            attempt=attempt, index=index_of(pod), node=pod.spec.node_name, since=since
        )

    vanished = (each for each in gang.vanished if may_train(each.pod, True))
    yield from (worker(each.pod, each.time) for each in vanished)
    # Pods that vanished while no controller ran, with their silent machines.
    status = job.status
    pods = [pod for pod in gang.pods if may_train(pod, False)]
    present_indexes = {index_of(pod) for pod in pods if attempt_of(pod) == status.attempt}
    for index, name in enumerate(status.worker_nodes):
        node = cluster_nodes.get(name)
        if name and index not in present_indexes and (node is None or not nodes.is_ready(node)):
            yield UnfencedWorker(attempt=status.attempt, index=index, node=name, since=now)
    for pod in pods:
        state, silence = state_of(pod), nodes.find_silence(cluster_nodes, pod, now)
        if state is PodState.COLLECTED or (silence is not None and state is not PodState.STOPPED):
            yield worker(pod, (silence.since if silence else None) or now)


def _training(job: TorchrunJob, gang: ObservedGang) -> Callable[[Pod, bool], bool]:
    """Return whether a pod of any gang may run ranks, as a function of the pod.

    It has a machine, and it or its leader has the annotation that starts ranks. A leader whose pod
    is gone may have started them. A suspended Job that resumes may have two leaders of one attempt.

    The second argument is whether the pod has vanished. The Job controller removes the finalizer of
    such a pod for whatever reason, so it counts as one from before a suspension, if there was one.
    """
    jobs = gang.child_jobs
    has_been_suspended = bool(jobs) and head_and_workers.resumption_of(gang) is not None

    def gate_of(pod: Pod, has_vanished: bool = False) -> tuple[int, bool, bool]:
        is_from_before = head_and_workers.is_from_before_suspension(gang, pod)
        is_from_before = is_from_before or (has_vanished and has_been_suspended)
        return attempt_of(pod), of_earlier_job(job, gang, pod), is_from_before

    leaders = [pod for pod in gang.pods if index_of(pod) == 0]
    open_gates = {gate_of(leader) for leader in leaders if has_own_start(leader)}
    closed_gates = {gate_of(leader) for leader in leaders} - open_gates
    return lambda pod, has_vanished: (
        bool(pod.spec.node_name)
        and (
            has_own_start(pod)
            or (follows_leader(pod) and gate_of(pod, has_vanished) not in closed_gates)
        )
    )


def of_earlier_job(job: TorchrunJob, gang: ObservedGang, pod: Pod) -> bool:
    """Whether the pod may belong to an earlier job of the same name.

    It belongs to this job if its child Job exists, or if it is younger than the job; the API has
    times in whole seconds.
    """
    children = (*gang.child_jobs, *gang.worker_jobs)
    if any(pod.metadata.controlled_by(child.metadata.uid) for child in children):
        return False
    pod_created, job_created = pod.metadata.creation_timestamp, job.metadata.creation_timestamp
    return pod_created is not None and job_created is not None and pod_created <= job_created


def _attempt_in_job(job: TorchrunJob, gang: ObservedGang, pod: Pod) -> int | None:
    """Return the attempt of the pod; None if it may belong to an earlier job of the same name."""
    return None if of_earlier_job(job, gang, pod) else attempt_of(pod)


def _is_released(
    job: TorchrunJob,
    gang: ObservedGang,
    cluster_nodes: Mapping[str, Node] | None,
    worker: UnfencedWorker,
    now: datetime,
    release_delay: timedelta,
    machines_off: frozenset[str],
) -> bool:
    """Whether the worker no longer blocks a new gang, by what its machine shows.

    The time of Ready is from the machine's clock. If it is in the future, the wait is longer,
    because a worker that is released too early writes the same checkpoints as the new gang.
    """
    if cluster_nodes is None:
        return False
    node = cluster_nodes.get(worker.node)
    if node is None:
        return machine_of(worker) in machines_off
    if nodes.is_out_of_service(node):
        return True
    since = _ready_since(cluster_nodes, worker)
    return since is not None and (_has_pod(job, gang, worker) or now - since >= release_delay)


def _executed_orders(gang: ObservedGang) -> set[str]:
    """Return the orders to fence that came before the ranks of the present gang, if they run."""
    orders = {pod.metadata.annotations.fence for pod in gang.workers}
    return orders - {""} if gang.has_reported else set()


def _release_delay(policy: ResolvedReliability) -> timedelta:
    """Return how long a machine must be Ready again before its deleted pods count as ended."""
    return timedelta(seconds=policy.grace_seconds) + RELEASE_DELAY


def _machines_off(job: TorchrunJob) -> frozenset[str]:
    """Return the machines that the annotation of the job declares off, as `machine_of` has them."""
    annotation = job.metadata.annotations.get(names.MACHINES_OFF, "")
    return frozenset(machine.strip() for machine in annotation.split(","))


def machine_of(worker: UnfencedWorker) -> str:
    """Return the worker's machine for the annotation, without an attempt for an earlier job.

    With the attempt, an old annotation does not apply to a later loss of the same machine.
    """
    return f"{'' if worker.attempt is None else worker.attempt}/{worker.node}"


def _ready_since(
    cluster_nodes: Mapping[str, Node] | None, worker: UnfencedWorker
) -> datetime | None:
    """Return since when the machine is Ready and has to end the worker."""
    node = cluster_nodes.get(worker.node) if cluster_nodes else None
    ready = nodes.ready_condition(node) if node is not None else None
    if ready is None or ready.status != "True" or ready.last_transition_time is None:
        return None
    return max(ready.last_transition_time, worker.since or ready.last_transition_time)


def _has_pod(job: TorchrunJob, gang: ObservedGang, worker: UnfencedWorker) -> bool:
    """Whether the pod of the worker exists, so that its kubelet will report its end."""
    return any(
        index_of(pod) == worker.index
        and pod.spec.node_name == worker.node
        and _attempt_in_job(job, gang, pod) == worker.attempt
        for pod in gang.pods
        if state_of(pod) is not PodState.COLLECTED
    )


def _identity(worker: UnfencedWorker) -> tuple[int | None, int, str]:
    return worker.attempt, worker.index, worker.node


def _order(worker: UnfencedWorker) -> tuple[int, int, str]:
    return -1 if worker.attempt is None else worker.attempt, worker.index, worker.node


def fence_annotation(workers: tuple[UnfencedWorker, ...], now: datetime) -> str:
    """Return the annotation for the launchers: the time, and the workers that are to be fenced.

    Ranges of indexes keep it below 32 KiB for any workers of one attempt.
    """
    indexes: dict[int, set[int]] = {}
    for worker in workers:
        assert worker.attempt is not None, "launchers cannot fence an earlier job"
        indexes.setdefault(worker.attempt, set()).add(worker.index)
    attempts = (f"{attempt}:{_format_ranges(indexes[attempt])}" for attempt in sorted(indexes))
    return " ".join([format_time(now), *attempts])


def has_worker(order: str, worker: UnfencedWorker) -> bool:
    """Whether the annotation orders to fence the worker."""
    for word in order.split()[1:]:
        attempt, _, ranges = word.partition(":")
        if attempt == str(worker.attempt):
            return any(_covers(each, worker.index) for each in ranges.split(","))
    return False


def _covers(text: str, index: int) -> bool:
    first, _, last = text.partition("-")
    ends = first, last or first
    return all(end.isdecimal() for end in ends) and int(ends[0]) <= index <= int(ends[1])


def _format_ranges(indexes: Iterable[int]) -> str:
    """Return the indexes as 0-3,7."""
    ranges: list[tuple[int, int]] = []
    for index in sorted(indexes):
        if ranges and ranges[-1][1] == index - 1:
            ranges[-1] = ranges[-1][0], index
        else:
            ranges.append((index, index))
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def format_time(time: datetime) -> str:
    """Return the time as in annotations."""
    return f"{time.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


def parse_time(text: str) -> datetime | None:
    """Return the time of an annotation, None if it is not a time."""
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    except ValueError:
        return None
