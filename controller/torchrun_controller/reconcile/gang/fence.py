"""Workers on lost nodes: nobody knows whether they still run and write the same checkpoints.

That a pod is gone proves nothing once its node is silent: whoever deletes a Node object has its
pods removed from the API, and a forced deletion asks no kubelet. So such workers are remembered,
from the first moment of NotReady on, in `status.unfenced`, until one of these holds:

- its node is tainted out-of-service: somebody vouches that the machine is off;
- its Node object is gone, and an annotation of the TorchrunJob vouches for its machine;
- its node is Ready again and knows the pod: from now on the kubelet's word on its end counts;
- its node has been Ready again for longer than a kubelet takes to end what nobody wants any more;
- the user allows an unfenced restart.

No gang is made before the status has all of them. `status.workerNodes` has the nodes of the present
gang, so that workers are found whose pods went while no controller ran.

Meanwhile the launchers of a new gang can fence such a worker themselves, where all share a state
directory (torchrun_runtime.launch.fencing): its launcher, which proved that it watches for newer
gangs, kills its ranks. They know when that is done, so the memory stays: it costs the gangs after
them nothing.
"""

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta

from msgspec import Struct
from msgspec.structs import replace

from torchrun_api import names
from torchrun_api.core import Pod
from torchrun_api.status import UnfencedWorker
from torchrun_controller.reconcile.gang.failures import UNPROVEN, words_of
from torchrun_controller.reconcile.model.observed import Observed
from torchrun_controller.reconcile.pods import nodes
from torchrun_controller.reconcile.pods.lifecycle import (
    alive,
    attempt_of,
    collected,
    index_of,
    stopped,
)
from torchrun_controller.reconcile.spec.reliability import resolve_reliability

# From the go-ahead until ranks start, for people: the launchers wait 45 s of their own clocks.
FENCE_SECONDS = 50
# Beyond a pod's own grace period, for a kubelet that is back to end what nobody wants any more.
CLEARING = timedelta(seconds=30)


class BlockingPods(Struct, frozen=True):
    """What of older gangs may still run: pods that will tell of their end, workers that may not."""

    pods: tuple[Pod, ...] = ()
    unfenced: tuple[UnfencedWorker, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.pods or self.unfenced)


def blocking_pods(observed: Observed, attempt: int, now: datetime) -> BlockingPods:
    """What holds the gang of this attempt at its gate."""
    older = [pod for pod in observed.gang.stale_pods if alive(pod)]
    if not observed.gang.child_jobs or attempt_of(observed.gang.current_job.metadata) < attempt:
        older += [pod for pod in observed.gang.workers if alive(pod)]
    return BlockingPods(
        tuple(pod for pod in older if nodes.find_loss(observed.cluster.nodes, pod, now) is None),
        tuple(
            worker
            for worker in outstanding(observed, now)
            if worker.attempt is None or worker.attempt < attempt
        ),
    )


def outstanding(observed: Observed, now: datetime) -> tuple[UnfencedWorker, ...]:
    """The workers that are to be remembered: those that were and are not fenced yet, and new ones.

    A worker that never got the go-ahead cannot train, whatever becomes of its node.
    """
    policy = resolve_reliability(observed.job, observed.queue)
    if policy.allow_unfenced_restart:
        return ()
    clearing = timedelta(seconds=policy.grace_seconds) + CLEARING
    off = _machines_off(observed)
    kept = [w for w in _judged(observed) if not _released(observed, w, now, clearing, off)]
    known = {_identity(worker) for worker in kept}
    new = {
        _identity(worker): worker
        for worker in (*_vanished(observed, now), *_all_silent(observed, now))
        if _identity(worker) not in known and not _released(observed, worker, now, clearing, off)
    }
    return (*kept, *sorted(new.values(), key=_order))


def unrecorded(observed: Observed, now: datetime) -> bool:
    """Whether there are workers to be remembered that the status does not have yet."""
    known = {_identity(worker) for worker in observed.job.status.unfenced}
    return any(_identity(worker) not in known for worker in outstanding(observed, now))


def worker_nodes(
    observed: Observed, attempt: int, unfenced: tuple[UnfencedWorker, ...]
) -> tuple[str, ...]:
    """The nodes of the workers of an attempt that may run ranks, by index; "" for no such worker.

    The `unfenced` ones are remembered already. Of a worker without a pod it has been judged whether
    it is one of these.
    """
    if observed.cluster.nodes is None:
        return ()
    known = {_identity(worker) for worker in unfenced}
    found = {
        index_of(pod): pod.spec.node_name
        for pod in (*observed.gang.workers, *observed.gang.stale_pods)
        if attempt_of(pod.metadata) == attempt
        and _may_train(pod)
        and not stopped(pod)
        and not of_earlier_job(observed, pod)
        and (attempt, index_of(pod), pod.spec.node_name) not in known
    }
    return tuple(found.get(index, "") for index in range(max(found, default=-1) + 1))


def unproven_loss(observed: Observed, pod: Pod, now: datetime) -> nodes.NodeLoss | None:
    """Why the pod's node is lost, where its containers are not known to have stopped."""
    return None if stopped(pod) else nodes.find_loss(observed.cluster.nodes, pod, now)


def next_look(observed: Observed, now: datetime) -> float | None:
    """Seconds until time alone releases a worker."""
    policy = resolve_reliability(observed.job, observed.queue)
    clearing = timedelta(seconds=policy.grace_seconds) + CLEARING
    ends = [
        (since + clearing - now).total_seconds()
        for worker in outstanding(observed, now)
        if (since := _ready_since(observed, worker)) is not None
    ]
    given = fencing_since(observed)
    if given is not None:
        ends.append(FENCE_SECONDS - (now - given).total_seconds())
    return min((seconds for seconds in ends if seconds > 0), default=None)


def fencing_since(observed: Observed) -> datetime | None:
    """When the present gang was told to fence the one before it; None where it need not wait.

    Gangs before that one were fenced by it, or its launchers know that they were not.
    """
    if not observed.gang.child_jobs:
        return None
    last = attempt_of(observed.gang.current_job.metadata) - 1
    told = (pod.metadata.annotations.fence.partition(" ") for pod in observed.gang.workers)
    times = [time_of(time) for time, _, who in told if f" {last}:" in f" {who}"]
    return max((time for time in times if time is not None), default=None)


def instruction(workers: tuple[UnfencedWorker, ...], now: datetime) -> str:
    """The annotation that tells a launcher to wait out the fence, and for whom.

    Less than 32 KiB for any workers of one attempt, as ranges of their indexes.
    """
    indexes: dict[int, set[int]] = {}
    for worker in workers:
        assert worker.attempt is not None, "launchers know nothing of an earlier job"
        indexes.setdefault(worker.attempt, set()).add(worker.index)
    told = (f"{attempt}:{_ranges(indexes[attempt])}" for attempt in sorted(indexes))
    return " ".join([stamp(now), *told])


def _ranges(indexes: Iterable[int]) -> str:
    """As 0-3,7."""
    ranges: list[tuple[int, int]] = []
    for index in sorted(indexes):
        if ranges and ranges[-1][1] == index - 1:
            ranges[-1] = ranges[-1][0], index
        else:
            ranges.append((index, index))
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def stamp(time: datetime) -> str:
    """As annotations hold a time."""
    return f"{time.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


def time_of(stamped: str) -> datetime | None:
    """The time of an annotation, None where it holds none."""
    try:
        return datetime.strptime(stamped, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    except ValueError:
        return None


def _judged(observed: Observed) -> tuple[UnfencedWorker, ...]:
    """What is remembered, after what the present gang found out about it."""
    workers = observed.job.status.unfenced
    if not observed.gang.child_jobs or not workers:
        return workers
    present = attempt_of(observed.gang.current_job.metadata)
    if any(words_of(pod).reason == UNPROVEN for pod in observed.gang.workers if not alive(pod)):
        return tuple(
            replace(w, unproven=True) if w.attempt is None or w.attempt < present else w
            for w in workers
        )
    return workers


def _vanished(observed: Observed, now: datetime) -> Iterator[UnfencedWorker]:
    """Workers whose pods are gone unseen, on nodes of which nothing is heard.

    A pod that goes while its node is Ready has stopped.
    """
    status, known = observed.job.status, observed.cluster.nodes
    if known is None:
        return
    pods = (*observed.gang.workers, *observed.gang.stale_pods)
    there = {index_of(pod) for pod in pods if attempt_of(pod.metadata) == status.attempt}
    for index, name in enumerate(status.worker_nodes):
        node = known.get(name)
        if name and index not in there and (node is None or not nodes.is_ready(node)):
            yield UnfencedWorker(attempt=status.attempt, index=index, node=name, since=now)


def _all_silent(observed: Observed, now: datetime) -> Iterator[UnfencedWorker]:
    for pod in (*observed.gang.workers, *observed.gang.stale_pods):
        worker = _silent(observed, pod, now)
        if worker is not None:
            yield worker


def _may_train(pod: Pod) -> bool:
    """Whether it has the go-ahead, and a node to go ahead on."""
    meta = pod.metadata
    return meta.annotations.start == meta.labels.attempt and bool(pod.spec.node_name)


def _silent(observed: Observed, pod: Pod, now: datetime) -> UnfencedWorker | None:
    meta = pod.metadata
    if not _may_train(pod) or observed.cluster.nodes is None or stopped(pod):
        return None
    silence = nodes.find_silence(observed.cluster.nodes, pod, now)
    if silence is None and not collected(pod):
        return None
    return UnfencedWorker(
        attempt=None if of_earlier_job(observed, pod) else attempt_of(meta),
        index=index_of(pod),
        node=pod.spec.node_name,
        since=(silence.since if silence else None) or now,
    )


def of_earlier_job(observed: Observed, pod: Pod) -> bool:
    """Whether a worker may be that of an earlier job of the same name.

    It is this job's own where its child Job is, or where it is younger than the job in the whole
    seconds of the API.
    """
    children = (*observed.gang.child_jobs, *observed.gang.worker_jobs)
    if any(pod.metadata.controlled_by(child.metadata.uid) for child in children):
        return False
    made, own = pod.metadata.creation_timestamp, observed.job.metadata.creation_timestamp
    return made is not None and own is not None and made <= own


def _released(
    observed: Observed,
    worker: UnfencedWorker,
    now: datetime,
    clearing: timedelta,
    off: frozenset[str],
) -> bool:
    if observed.cluster.nodes is None:
        return False
    node = observed.cluster.nodes.get(worker.node)
    if node is None:
        return vouched(worker) in off
    if nodes.is_out_of_service(node):
        return True
    since = _ready_since(observed, worker)
    return since is not None and (_is_there(observed, worker) or now - since >= clearing)


def _machines_off(observed: Observed) -> frozenset[str]:
    """The machines for which an annotation of the job vouches, as `vouched` writes them."""
    said = observed.job.metadata.annotations.get(names.MACHINES_OFF, "")
    return frozenset(word.strip() for word in said.split(","))


def vouched(worker: UnfencedWorker) -> str:
    """A worker's machine as that annotation has it: no attempt for one of an earlier job.

    The attempt keeps an old annotation from vouching for a later loss of the same node.
    """
    return f"{'' if worker.attempt is None else worker.attempt}/{worker.node}"


def _ready_since(observed: Observed, worker: UnfencedWorker) -> datetime | None:
    node = observed.cluster.nodes.get(worker.node) if observed.cluster.nodes else None
    ready = nodes.ready_condition(node) if node is not None else None
    if ready is None or ready.status != "True":
        return None
    return ready.last_transition_time


def _is_there(observed: Observed, worker: UnfencedWorker) -> bool:
    """Whether its pod is there, and what its kubelet is going to say of it counts."""
    return any(
        index_of(pod) == worker.index
        and pod.spec.node_name == worker.node
        and (worker.attempt is None or attempt_of(pod.metadata) == worker.attempt)
        for pod in (*observed.gang.workers, *observed.gang.stale_pods)
        if not collected(pod)
    )


def _identity(worker: UnfencedWorker) -> tuple[int | None, int, str]:
    return worker.attempt, worker.index, worker.node


def _order(worker: UnfencedWorker) -> tuple[int, int, str]:
    return -1 if worker.attempt is None else worker.attempt, worker.index, worker.node
