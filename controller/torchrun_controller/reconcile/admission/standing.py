"""What one job is to the coordinator: it waits, holds what it was admitted for, or gives it back.

A charge is given back only when reconcile has said, in a status that it made after the refusal,
that nothing of the job runs: a gang that is being made at this moment is of an older status. The
reasons and phases below are these words.
"""

from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from msgspec import Struct

from torchrun_api import names
from torchrun_api.admission import Admission
from torchrun_api.core import Job, Pod
from torchrun_api.job import TorchrunJob
from torchrun_api.json import JsonObject
from torchrun_api.quantity import QuantityError
from torchrun_api.queue import TorchrunQueue
from torchrun_controller.reconcile import roles
from torchrun_controller.reconcile.admission.machines import pod_of
from torchrun_controller.reconcile.admission.state import Request
from torchrun_controller.reconcile.attempts import admitted
from torchrun_controller.reconcile.invalid import InvalidSpecError
from torchrun_controller.reconcile.phases import TERMINAL
from torchrun_controller.reconcile.policy import policy_of
from torchrun_controller.reconcile.size import Size, size_of
from torchrun_controller.reconcile.workers import alive, attempt_of

LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)


class Standing(Struct, frozen=True, kw_only=True):
    """`request` is for the State, but for what depends on the time and on the nodes' taints.

    What does not take part, or has no request, has nothing said of it: what was said is taken back,
    and with it what its quota was charged with. `requeued`: it has given way, and waits again once
    it has heard that. `deadline` is of running time.
    """

    request: Request | None = None
    takes_part: bool = False
    requeued: bool = False
    tolerations: tuple[JsonObject, ...] = ()
    deadline: timedelta | None = None


class Gang(Struct, frozen=True, kw_only=True):
    """What runs of a job, whatever attempt it is of; `made` are the nodes of the present Job.

    `placed` are living pods by node, `heads` those of them with pods of their own.
    """

    nodes: int = 0
    made: int = 0
    since: datetime | None = None
    placed: dict[str, int] = {}
    heads: dict[str, int] = {}


def stand(
    job: TorchrunJob,
    queue: TorchrunQueue | None,
    child_jobs: tuple[Job, ...],
    pods: tuple[Pod, ...],
    lost: frozenset[str],
) -> Standing:
    """`child_jobs` and `pods` are the job's own; pods on `lost` nodes are not waited for."""
    present = running(child_jobs, pods, lost)
    charged = admitted.charged(job)
    # An admission outlives the absence of its queue, so that it is not gained twice.
    takes_part = admitted.takes_part(queue.spec) if queue is not None else charged > 0
    if not takes_part:
        held = present.nodes
    elif charged and _has_given_way(job, present):
        return Standing(takes_part=True, requeued=True)
    else:
        # Of a queue that has come to take part, what runs goes on.
        held = 0 if _is_over(job, present) else charged or present.made
    if held or (takes_part and queue is not None and _waits(job)):
        return _standing(job, queue, present, held, takes_part=takes_part)
    return Standing(takes_part=takes_part)


def running(child_jobs: tuple[Job, ...], pods: tuple[Pod, ...], lost: frozenset[str]) -> Gang:
    """The largest gang of which something runs, or is about to; during a resize there are two."""
    living = [
        pod
        for pod in pods
        if pod.metadata.labels.component == names.WORKER
        and alive(pod)
        and pod.spec.node_name not in lost
    ]
    sizes = Counter(attempt_of(pod.metadata) for pod in living)
    with_node = [pod for pod in living if pod.spec.node_name]
    placed = Counter(pod.spec.node_name for pod in with_node)
    heads = Counter(
        pod.spec.node_name for pod in with_node if pod.metadata.labels.role == names.HEAD
    )
    made = sum(roles.nodes_of(child) for child in child_jobs[-1:] if not _is_finished(child))
    return Gang(
        nodes=max([*sizes.values(), made]),
        made=made,
        since=child_jobs[-1].metadata.creation_timestamp if child_jobs else None,
        placed=dict(placed),
        heads=dict(heads),
    )


def _is_finished(child: Job) -> bool:
    return any(
        c.type in ("Complete", "Failed") and c.status == "True" for c in child.status.conditions
    )


def _is_over(job: TorchrunJob, present: Gang) -> bool:
    """Whether it is over, or paused, and nothing of it runs."""
    status = job.status
    if status.phase in TERMINAL:
        return not present.nodes
    told = status.observed_generation == job.metadata.generation
    return job.spec.suspend and told and status.phase == "Suspended"


def _has_given_way(job: TorchrunJob, present: Gang) -> bool:
    said = admitted.preempted(job)
    return bool(said) and job.status.reason == admitted.PREEMPTED and not present.nodes


def _waits(job: TorchrunJob) -> bool:
    asks = job.status.reason == admitted.WAITING and job.metadata.deletion_timestamp is None
    return asks and not job.spec.suspend


def _standing(
    job: TorchrunJob, queue: TorchrunQueue | None, present: Gang, held: int, *, takes_part: bool
) -> Standing:
    """Of a job that waits (`held` is 0) or holds so much."""
    pods = _pods(job, queue)
    wanted, head = pods.nodes, pods.head
    placed = present.placed if head is None else _less(present.placed, present.heads)
    meta, status = job.metadata, job.status
    admission = status.admission or Admission()
    return Standing(
        takes_part=takes_part,
        request=Request(
            namespace=meta.namespace,
            name=meta.name,
            uid=meta.uid,
            queue=job.spec.job_queue,
            created=meta.creation_timestamp or LONG_AGO,
            nodes=_asked(job, wanted, held, present) if takes_part else held,
            pod=pods.requests,
            gpus=pods.gpus,
            head=head,
            head_gpus=pods.head_gpus,
            priority=_priority(job, queue),
            node_selector=_selector(job, queue),
            admitted=held,
            placed=placed,
            since=(admission.time or present.since) if held else None,
            running=status.phase == "Running",
            preempted_for=admission.preempted_for,
            nominated=admission.nominated,
        ),
        tolerations=(queue.spec.scheduling.tolerations if queue else ())
        + job.spec.scheduling.tolerations,
        deadline=policy_of(job, queue).deadline,
    )


def _asked(job: TorchrunJob, wanted: int | None, held: int, present: Gang) -> int:
    """Less than is held only once no gang of the former size is there or under way."""
    if wanted is None or job.metadata.deletion_timestamp is not None:
        return held
    if wanted >= held:
        return wanted
    told = job.status.observed_generation == job.metadata.generation
    return max(wanted, present.nodes) if told else held


class _Pods(NamedTuple):
    """As in Request; `nodes` is None where the spec makes no run."""

    nodes: int | None
    requests: dict[str, int]
    gpus: int
    head: dict[str, int] | None = None
    head_gpus: int = 0


def _pods(job: TorchrunJob, queue: TorchrunQueue | None) -> _Pods:
    """What the spec asks for; of one that makes no run, what the status knows."""
    if queue is not None:
        try:
            return _pods_of(size_of(job.spec, queue.spec.node_resources))
        except (InvalidSpecError, QuantityError):
            pass
    gpus = (job.status.gpus or 0) // max(1, job.status.num_nodes or 1)
    return _Pods(None, {"pods": 1}, gpus)


def _pods_of(size: Size) -> _Pods:
    head = None if size.head is None else pod_of(size.head.requests)
    pod = pod_of(size.requests)
    if size.head is None or head is None:
        return _Pods(size.nodes, pod, size.gpus_per_node)
    if all(amount <= pod.get(name, 0) for name, amount in head.items()):
        return _Pods(size.nodes, pod, size.gpus_per_node, head, size.head.gpus_per_node)
    # Each of them counts for the larger of the two.
    most = size.largest
    return _Pods(size.nodes, pod_of(most.requests), most.gpus_per_node)


def _less(placed: dict[str, int], heads: dict[str, int]) -> dict[str, int]:
    left = {node: pods - heads.get(node, 0) for node, pods in placed.items()}
    return {node: pods for node, pods in left.items() if pods}


def _priority(job: TorchrunJob, queue: TorchrunQueue | None) -> int:
    if job.spec.priority is not None:
        return job.spec.priority
    return queue.spec.priority if queue is not None else 0


def _selector(job: TorchrunJob, queue: TorchrunQueue | None) -> dict[str, str]:
    base = queue.spec.scheduling.node_selector if queue is not None else {}
    return base | job.spec.scheduling.node_selector
