"""What one job is to the coordinator: it waits, holds what it was admitted for, or gives it back.

A charge is given back only when reconcile has said, in a status that it made after the refusal,
that nothing of the job runs: a gang that is being made at this moment is of an older status. The
reasons and phases below are these words.
"""

from collections import Counter
from datetime import UTC, datetime, timedelta

from msgspec import Struct

from torchrun_api import names
from torchrun_api.admission import Admission
from torchrun_api.core import Job, Pod
from torchrun_api.job import TorchrunJob
from torchrun_api.json import JsonObject
from torchrun_api.quantity import QuantityError
from torchrun_api.queue import TorchrunQueue
from torchrun_api.status import TERMINAL
from torchrun_controller.reconcile.admission.state import Request
from torchrun_controller.reconcile.pods import roles
from torchrun_controller.reconcile.pods.lifecycle import alive, attempt_of
from torchrun_controller.reconcile.spec import admission_status
from torchrun_controller.reconcile.spec.errors import InvalidSpecError
from torchrun_controller.reconcile.spec.reliability import resolve_reliability
from torchrun_controller.reconcile.spec.requests import GangRequests, pod_shortfall, requests_of
from torchrun_controller.reconcile.spec.scheduling import scheduling_of
from torchrun_controller.reconcile.spec.size import size_of

LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)


class Standing(Struct, frozen=True, kw_only=True):
    """`request` is for the State, but for what depends on the time and on the nodes' taints.

    What does not take part, or has no request, has nothing said of it: what was said is taken back,
    and with it what its quota was charged with. `requeued`: it has given way, and waits again once
    it has heard that. `outdated`: what its next gang asks for beyond what it was admitted for,
    where nothing of it runs. `deadline` is of running time.
    """

    request: Request | None = None
    takes_part: bool = False
    requeued: bool = False
    outdated: str = ""
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
    charged = admission_status.charged(job)
    # An admission outlives the absence of its queue, so that it is not gained twice.
    takes_part = admission_status.takes_part(queue.spec) if queue is not None else charged > 0
    if not takes_part:
        held = present.nodes
    elif charged and _has_given_way(job, present):
        return Standing(takes_part=True, requeued=True)
    else:
        # Of a queue that has come to take part, what runs goes on.
        held = 0 if _is_over(job, present) else _charge(job, present) or present.made
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


def _charge(job: TorchrunJob, present: Gang) -> int:
    """What it is charged with, less what it does not use once reconcile has left it."""
    admission = job.status.admission
    if (
        admission is None
        or not admission_status.gives_back(job)
        or not admission_status.has_given_back(job)
    ):
        return admission_status.charged(job)
    return max(admission.limit, present.nodes)


def _uses(job: TorchrunJob, held: int, present: Gang) -> int | None:
    """Pods of a gang that is smaller than what was admitted, where it may give back the rest.

    Not while an older gang of its ends, and not before reconcile has forgotten the last time.
    """
    shrunk = job.spec.elastic is not None and 0 < present.made == present.nodes < held
    told = admission_status.has_given_back(job) and not admission_status.gives_back(job)
    return present.made if shrunk and not told else None


def _has_given_way(job: TorchrunJob, present: Gang) -> bool:
    withdrawn = admission_status.withdrawn(job)
    return bool(withdrawn) and job.status.reason == withdrawn and not present.nodes


def _waits(job: TorchrunJob) -> bool:
    asks = job.status.reason == admission_status.WAITING and job.metadata.deletion_timestamp is None
    return asks and not job.spec.suspend


def _standing(
    job: TorchrunJob, queue: TorchrunQueue | None, present: Gang, held: int, *, takes_part: bool
) -> Standing:
    """Of a job that waits (`held` is 0) or holds so much."""
    asked, granted = _asked_of(job, queue), admission_status.granted_to(job)
    # The charge is what was admitted, whatever the spec says by now.
    pods = granted or asked or _known_of(job)
    head = pods.head
    placed = Counter(present.placed) - Counter({} if head is None else present.heads)
    scheduling = scheduling_of(job, queue)
    meta, status = job.metadata, job.status
    admission = status.admission or Admission()
    return Standing(
        takes_part=takes_part,
        outdated=_outdated(job, queue, asked, present) if takes_part else "",
        request=Request(
            namespace=meta.namespace,
            name=meta.name,
            uid=meta.uid,
            queue=admission.queue if granted is not None else job.spec.job_queue,
            created=meta.creation_timestamp or LONG_AGO,
            nodes=_nodes_asked(job, asked, held, present) if takes_part else held,
            pod=pods.pod,
            gpus=pods.gpus,
            head=head,
            head_gpus=pods.head_gpus,
            priority=_priority(job, queue),
            node_selector=scheduling.node_selector,
            admitted=held,
            placed=dict(placed),
            since=(admission.time or present.since) if held else None,
            running=status.phase == "Running",
            preempted_for=admission.preempted_for,
            nominated=admission.nominated,
            uses=_uses(job, held, present) if takes_part else None,
        ),
        tolerations=scheduling.tolerations,
        deadline=resolve_reliability(job, queue).deadline,
    )


def _outdated(
    job: TorchrunJob, queue: TorchrunQueue | None, asked: GangRequests | None, present: Gang
) -> str:
    """What the next gang lacks, once reconcile has said that it waits for just that."""
    waits = job.status.reason in (admission_status.WAITING, admission_status.OUTDATED)
    told = job.status.observed_generation == job.metadata.generation
    if queue is None or asked is None or present.nodes or not (waits and told):
        return ""
    if admission_status.granted_to(job) is None:
        return ""
    return admission_status.outdated(job, queue.metadata.name, asked)


def _nodes_asked(job: TorchrunJob, asked: GangRequests | None, held: int, present: Gang) -> int:
    """More only for a gang that may grow, less once no gang of the former size is there.

    A gang whose pods ask for more than those that were admitted can have no other size.
    """
    if asked is None or job.metadata.deletion_timestamp is not None:
        return held
    granted = admission_status.granted_to(job)
    if granted is not None and pod_shortfall(asked, granted):
        return held
    if not held or asked.nodes == held:
        return asked.nodes
    if asked.nodes > held:
        return asked.nodes if job.spec.elastic is not None else held
    told = job.status.observed_generation == job.metadata.generation
    return max(asked.nodes, present.nodes) if told else held


def _asked_of(job: TorchrunJob, queue: TorchrunQueue | None) -> GangRequests | None:
    """What the spec asks for; None where it makes no run."""
    if queue is None:
        return None
    try:
        return requests_of(job, queue, size_of(job.spec, queue.spec.node_resources))
    except (InvalidSpecError, QuantityError):
        return None


def _known_of(job: TorchrunJob) -> GangRequests:
    """Of a job whose spec makes no run: what the status knows."""
    nodes = job.status.num_nodes or 1
    gpus = (job.status.gpus or 0) // max(1, nodes)
    return GangRequests(nodes=nodes, pod={"pods": 1}, gpus=gpus)


def _priority(job: TorchrunJob, queue: TorchrunQueue | None) -> int:
    """At most what the queue allows, also of a job that was admitted before it did."""
    if queue is None:
        return job.spec.priority or 0
    wanted = queue.spec.priority if job.spec.priority is None else job.spec.priority
    most = queue.spec.limits.max_priority
    return wanted if most is None else min(wanted, most)
