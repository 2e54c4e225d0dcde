"""Workers on lost nodes: nobody knows whether they still run and write the same checkpoints.

That a pod is gone proves nothing once its node is silent: whoever deletes a Node object has its
pods removed from the API, and a forced deletion asks no kubelet. So such workers are remembered,
from the first moment of NotReady on, in `status.unfenced` and in an annotation of the child Job
that is made before the status is written, until one of these holds:

- its node is tainted out-of-service: somebody vouches that the machine is off;
- its node is Ready again and knows the pod: from now on the kubelet's word on its end counts;
- its node has been Ready again for longer than a kubelet takes to end what nobody wants any more;
- the user allows an unfenced restart.

Meanwhile the launchers of a new gang can fence such a worker themselves, where all share a state
directory (torchrun_runtime.launch.epoch): its own launcher, which proved that it watches for newer
gangs, kills its ranks. They know when that is done, so the memory stays: it costs the gangs after
them nothing.
"""

from datetime import UTC, datetime, timedelta

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from torchrun_api.core import Pod
from torchrun_api.status import UnfencedWorker
from torchrun_controller.reconcile import words
from torchrun_controller.reconcile.attempts.failures import UNPROVEN, words_of
from torchrun_controller.reconcile.observed import Observed
from torchrun_controller.reconcile.placement import nodes
from torchrun_controller.reconcile.policy import policy_of
from torchrun_controller.reconcile.workers import alive, attempt_of, collected, index_of, stopped

# From the go-ahead until ranks start, for people: the launchers wait 45 s of their own clocks.
FENCE_SECONDS = 50
# Beyond a pod's own grace period, for a kubelet that is back to end what nobody wants any more.
CLEARING = timedelta(seconds=30)


class Holders(Struct, frozen=True):
    """What of older gangs may still run: pods that will tell of their end, workers that may not."""

    pods: tuple[Pod, ...] = ()
    unfenced: tuple[UnfencedWorker, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.pods or self.unfenced)


def holders(observed: Observed, attempt: int, now: datetime) -> Holders:
    """What holds the gang of this attempt at its gate."""
    older = [pod for pod in observed.ghosts if alive(pod)]
    if not observed.child_jobs or attempt_of(observed.child_jobs[-1].metadata) < attempt:
        older += [pod for pod in observed.workers if alive(pod)]
    return Holders(
        tuple(pod for pod in older if nodes.loss(observed, pod, now) is None),
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
    policy = policy_of(observed.job, observed.queue)
    if policy.allow_unfenced_restart:
        return ()
    clearing = timedelta(seconds=policy.grace_seconds) + CLEARING
    kept = [w for w in _judged(observed) if not _released(observed, w, now, clearing)]
    known = {_identity(worker) for worker in kept}
    new = [
        worker
        for pod in (*observed.workers, *observed.ghosts)
        if (worker := _silent(observed, pod, now)) is not None
        and _identity(worker) not in known
        and not _released(observed, worker, now, clearing)
    ]
    return (*kept, *sorted(new, key=_order))


def remembered(observed: Observed) -> tuple[UnfencedWorker, ...]:
    """What the status says, or a child Job that is newer than it."""
    status = observed.job.status
    if observed.child_jobs:
        child = observed.child_jobs[-1].metadata
        if attempt_of(child) > status.attempt:
            return decode(child.annotations.unfenced)
    return status.unfenced


def untold(observed: Observed, now: datetime) -> bool:
    """Whether there are workers to be remembered of whom nothing tells yet but their pods."""
    known = {_identity(worker) for worker in remembered(observed)}
    return any(_identity(worker) not in known for worker in outstanding(observed, now))


def decode(annotation: str) -> tuple[UnfencedWorker, ...]:
    """Of a child Job, as `encode` made it; nothing where it is not ours to read."""
    return words.read(annotation, tuple[UnfencedWorker, ...]) or ()


def encode(workers: tuple[UnfencedWorker, ...]) -> str:
    """For the annotation of a child Job."""
    return msgspec.json.encode(workers).decode()


def unproven_loss(observed: Observed, pod: Pod, now: datetime) -> nodes.Loss | None:
    """Why the pod's node is lost, where its containers are not known to have stopped."""
    return None if stopped(pod) else nodes.loss(observed, pod, now)


def next_look(observed: Observed, now: datetime) -> float | None:
    """Seconds until time alone releases a worker."""
    policy = policy_of(observed.job, observed.queue)
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
    if not observed.child_jobs:
        return None
    last = attempt_of(observed.child_jobs[-1].metadata) - 1
    told = (pod.metadata.annotations.fence.partition(" ") for pod in observed.workers)
    times = [time_of(time) for time, _, who in told if f" {last}-" in f" {who}"]
    return max((time for time in times if time is not None), default=None)


def instruction(workers: tuple[UnfencedWorker, ...], now: datetime) -> str:
    """The annotation that tells a launcher to wait out the fence, and for whom."""
    told = " ".join(f"{worker.attempt}-{worker.index}" for worker in workers)
    return f"{stamp(now)} {told}"


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
    workers = remembered(observed)
    if not observed.child_jobs or not workers:
        return workers
    present = attempt_of(observed.child_jobs[-1].metadata)
    if any(words_of(pod).reason == UNPROVEN for pod in observed.workers if not alive(pod)):
        return tuple(
            replace(w, unproven=True) if w.attempt is None or w.attempt < present else w
            for w in workers
        )
    return workers


def _silent(observed: Observed, pod: Pod, now: datetime) -> UnfencedWorker | None:
    meta = pod.metadata
    if meta.annotations.start != meta.labels.attempt or observed.nodes is None or stopped(pod):
        return None
    silence = nodes.silence(observed, pod, now)
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
    children = (*observed.child_jobs, *observed.worker_jobs)
    if any(pod.metadata.controlled_by(child.metadata.uid) for child in children):
        return False
    made, own = pod.metadata.creation_timestamp, observed.job.metadata.creation_timestamp
    return made is not None and own is not None and made <= own


def _released(
    observed: Observed, worker: UnfencedWorker, now: datetime, clearing: timedelta
) -> bool:
    node = observed.nodes.get(worker.node) if observed.nodes else None
    if node is None:
        return False
    if nodes.out_of_service(node):
        return True
    since = _ready_since(observed, worker)
    return since is not None and (_is_there(observed, worker) or now - since >= clearing)


def _ready_since(observed: Observed, worker: UnfencedWorker) -> datetime | None:
    node = observed.nodes.get(worker.node) if observed.nodes else None
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
        for pod in (*observed.workers, *observed.ghosts)
        if not collected(pod)
    )


def _identity(worker: UnfencedWorker) -> tuple[int | None, int, str]:
    return worker.attempt, worker.index, worker.node


def _order(worker: UnfencedWorker) -> tuple[int, int, str]:
    return -1 if worker.attempt is None else worker.attempt, worker.index, worker.node
