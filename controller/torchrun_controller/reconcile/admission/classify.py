"""Classifies one job for admission: it waits, is admitted, or has to release its admission.

A charge is released only once reconcile has reported, in a status written after the refusal, that
nothing of the job runs: a gang that is being created at this moment belongs to an older status.
The reasons and phases below are those that reconcile writes.
"""

from collections import Counter
from datetime import UTC, datetime, timedelta

from msgspec import Struct

from torchrun_api import names
from torchrun_api.json import JsonObject
from torchrun_api.kinds.admission import Admission
from torchrun_api.kinds.core import Job, Pod, PodRequests
from torchrun_api.kinds.job import TorchrunJob, TorchrunJobSpec
from torchrun_api.kinds.queue import NodeResources, TorchrunQueue
from torchrun_api.kinds.status import TERMINAL
from torchrun_controller.reconcile.admission.model import Workload
from torchrun_controller.reconcile.pods import head_and_workers
from torchrun_controller.reconcile.pods.lifecycle import (
    alive,
    attempt_of,
    may_create_pods,
    uses_room,
)
from torchrun_controller.reconcile.spec import admission_status
from torchrun_controller.reconcile.spec.reliability import resolve_reliability
from torchrun_controller.reconcile.spec.requests import (
    GangRequests,
    pod_shortfall,
    requests_of,
    requests_of_pods,
)
from torchrun_controller.reconcile.spec.resolve import scheduling_of
from torchrun_controller.reconcile.spec.size import size_of

_LONGEST_KEY = 317  # of a taint: a prefix, "/" and a name
LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)


class Classification(Struct, frozen=True, kw_only=True):
    """What admission does with a job.

    `workload` is complete except for what depends on the time and on the taints of machines. A job
    without a workload, or that does not take part, loses its admission status and its charge.
    `requeued`: it was preempted, nothing of it runs, and it waits again. `outdated` is what its
    next gang requests beyond its admission, while nothing of it runs. `deadline` limits the running
    time.
    """

    takes_part: bool
    workload: Workload | None = None
    requeued: bool = False
    outdated: str = ""
    tolerations: tuple[JsonObject, ...] = ()
    deadline: timedelta | None = None


class RunningGang(Struct, frozen=True, kw_only=True):
    """What runs of a job, of any attempt. `created_nodes` is that of the present Job.

    It is 0 once the Job creates no more pods: only those that run count then (`live_nodes`), which
    are the larger part of `nodes` during a resize. `last_job` is the latest Job, whatever its
    state. `pod` and `head` are what the pods of the latest attempt request. `may_run`: a pod runs,
    or the present Job may create one. `pods_by_node` counts running pods, `heads_by_node` the head
    pods among them.
    """

    pod: PodRequests | None
    head: PodRequests | None
    nodes: int
    live_nodes: int
    created_nodes: int
    last_job: Job | None
    may_run: bool
    since: datetime | None
    pods_by_node: dict[str, int]
    heads_by_node: dict[str, int]

    def placed_pods(self, head: dict[str, int] | None) -> dict[str, int]:
        """Return the running pods by machine, without those of a smaller `head`: see Workload."""
        heads = {} if head is None else self.heads_by_node
        return dict(Counter(self.pods_by_node) - Counter(heads))


def classify_job(
    job: TorchrunJob,
    queue: TorchrunQueue | None,
    child_jobs: tuple[Job, ...],
    pods: tuple[Pod, ...],
    lost_nodes: frozenset[str],
) -> Classification:
    """Classify a job by its own child Jobs and pods; pods on `lost_nodes` count as ended."""
    most_nodes = _most_nodes(job.spec)
    gang = running_gang(child_jobs, pods, lost_nodes, most_nodes)
    charged_nodes = admission_status.charged(job)
    # An admission outlives the absence of its queue, so that it is not granted twice.
    takes_part = admission_status.takes_part(queue.spec) if queue is not None else charged_nodes > 0
    if not takes_part:
        admitted_nodes = gang.nodes
    elif charged_nodes and _was_requeued(job, gang):
        return Classification(takes_part=True, requeued=True)
    else:
        is_over = _is_over(job, gang)
        admitted_nodes = 0 if is_over else _charge(job, gang) or _uncharged(job, gang)
    if admitted_nodes or (takes_part and queue is not None and _waits_for_admission(job)):
        return _classify(job, queue, gang, admitted_nodes, takes_part=takes_part)
    return Classification(takes_part=takes_part)


def running_gang(
    child_jobs: tuple[Job, ...],
    pods: tuple[Pod, ...],
    lost_nodes: frozenset[str],
    most_nodes: int = names.MOST_NODES,
) -> RunningGang:
    """Return the largest gang that runs or is about to; during a resize there are two.

    Users can edit the size of a Job: of its pods that do not exist yet, at most `most_nodes` count.
    """
    live_pods = [pod for pod in pods if runs(pod, lost_nodes)]
    sizes = Counter(attempt_of(pod) for pod in live_pods)
    with_node = [pod for pod in live_pods if pod.spec.node_name]
    pods_by_node = Counter(pod.spec.node_name for pod in with_node)
    heads_by_node = Counter(
        pod.spec.node_name for pod in with_node if pod.metadata.labels.role == names.HEAD
    )
    workers, heads = _latest_requests(child_jobs or tuple(live_pods))
    present = next((child for child in child_jobs[-1:] if may_create_pods(child)), None)
    created_nodes = 0
    if present is not None:
        created_nodes = min(head_and_workers.nodes_of(present), most_nodes)
    live_nodes = max(sizes.values(), default=0)
    return RunningGang(
        pod=next(iter((*workers, *heads)), None),
        head=next(iter(heads), None) if workers else None,
        nodes=max(created_nodes, live_nodes),
        live_nodes=live_nodes,
        created_nodes=created_nodes,
        last_job=child_jobs[-1] if child_jobs else None,
        may_run=bool(live_pods) or present is not None,
        since=child_jobs[-1].metadata.creation_timestamp if child_jobs else None,
        pods_by_node=dict(pods_by_node),
        heads_by_node=dict(heads_by_node),
    )


def runs(pod: Pod, lost_nodes: frozenset[str]) -> bool:
    """Whether a pod of a gang uses its machine, or may soon."""
    return alive(pod) and pod.spec.node_name not in lost_nodes and uses_room(pod)


def _latest_requests(
    children: tuple[Job, ...] | tuple[Pod, ...],
) -> tuple[list[PodRequests], list[PodRequests]]:
    """Return what the workers and the head of the latest attempt request.

    The API server has validated the spec of a pod, and that of a Job cannot be changed.
    """
    latest = max(map(attempt_of, children), default=0)
    workers: list[PodRequests] = []
    heads: list[PodRequests] = []
    for child in children:
        if attempt_of(child) == latest:
            spec = child.spec.template.spec if isinstance(child, Job) else child.spec
            (heads if child.metadata.labels.role == names.HEAD else workers).append(spec)
    return workers, heads


def _most_nodes(spec: TorchrunJobSpec) -> int:
    """Return the most nodes that a gang of the job can have; there are no more nodes than GPUs."""
    if spec.elastic is not None:
        return spec.elastic.max_nodes
    return spec.num_nodes or spec.num_gpus or 0


def _is_over(job: TorchrunJob, gang: RunningGang) -> bool:
    """Whether the job has finished, or is suspended or deleted, and nothing of it runs."""
    status = job.status
    if status.phase in TERMINAL or job.metadata.terminating:
        return not gang.may_run
    is_observed = status.observed_generation == job.metadata.generation
    return job.spec.suspend and is_observed and status.phase == "Suspended"


def _charge(job: TorchrunJob, gang: RunningGang) -> int:
    """Return the charged nodes, or what the present Job may create if that is more.

    A larger gang may have been created at the moment when the charge of a shrunk one was reduced.
    """
    charged_nodes = admission_status.charged(job)
    return max(charged_nodes, gang.created_nodes) if charged_nodes else 0


def _uncharged(job: TorchrunJob, gang: RunningGang) -> int:
    """Return the nodes of a gang that already runs, or ends, when its queue begins to take part.

    Pods of a job that waits for admission come back with a lost machine, and are soon deleted.
    """
    return gang.created_nodes if _waits_for_admission(job) else gang.nodes


def _was_requeued(job: TorchrunJob, gang: RunningGang) -> bool:
    reason = admission_status.withdrawn(job)
    return bool(reason) and admission_status.request(job) == reason and not gang.nodes


def _waits_for_admission(job: TorchrunJob) -> bool:
    is_waiting = admission_status.request(job) == admission_status.WAITING
    return is_waiting and not job.metadata.terminating and not job.spec.suspend


def _classify(
    job: TorchrunJob,
    queue: TorchrunQueue | None,
    gang: RunningGang,
    admitted_nodes: int,
    *,
    takes_part: bool,
) -> Classification:
    """Classify a job that waits (`admitted_nodes` is 0) or is admitted for this many nodes."""
    requests, recorded = _requests(job, queue), admission_status.granted_requests(job)
    # The charge is what was admitted, or what already runs; an edit of the spec does not change it.
    grant = recorded or (_requests_of_gang(queue, gang) if admitted_nodes else None)
    pods = grant or requests or GangRequests(nodes=1, pod={"pods": 1})
    nodes = admitted_nodes
    if takes_part:
        nodes = _requested_nodes(job, requests, grant, admitted_nodes, gang)
    scheduling = scheduling_of(job, queue)
    meta, status = job.metadata, job.status
    admission = status.admission or Admission()
    return Classification(
        takes_part=takes_part,
        outdated=_describe_excess(job, queue, requests, gang) if takes_part else "",
        workload=Workload(
            namespace=meta.namespace,
            name=meta.name,
            uid=meta.uid,
            queue=admission.queue if recorded is not None else job.spec.job_queue,
            created=meta.creation_timestamp or LONG_AGO,
            nodes=nodes,
            pod=pods.pod,
            gpus=pods.gpus,
            head=pods.head,
            head_gpus=pods.head_gpus,
            priority=_priority(job, queue),
            node_selector=scheduling.node_selector,
            admitted=admitted_nodes,
            pods_by_node=gang.placed_pods(pods.head),
            since=(admission.time or gang.since) if admitted_nodes else None,
            running=status.phase == "Running",
            # Reconcile does not end the gang of a deleted job, so no job waits for its machines.
            preempted_for="" if meta.terminating else admission.preempted_for,
            nominated=admission.nominated,
            is_deleted=meta.terminating,
            is_fixed=bool(job.invalid),
        ),
        tolerations=_compact(scheduling.tolerations),
        deadline=resolve_reliability(job, queue).deadline,
    )


def _describe_excess(
    job: TorchrunJob,
    queue: TorchrunQueue | None,
    requests: GangRequests | None,
    gang: RunningGang,
) -> str:
    """Return what the next gang lacks, once reconcile has reported that it cannot create one."""
    state = admission_status.request(job)
    is_observed = job.status.observed_generation == job.metadata.generation
    if gang.nodes or not is_observed or admission_status.granted_requests(job) is None:
        return ""
    if state == admission_status.UNUSABLE:
        return "The job can have no pods with its present queue and spec."
    is_waiting = state in (admission_status.WAITING, admission_status.OUTDATED)
    if queue is None or requests is None or not is_waiting:
        return ""
    return admission_status.find_excess(job, queue.metadata.name, requests)


def _requested_nodes(
    job: TorchrunJob,
    requests: GangRequests | None,
    grant: GangRequests | None,
    admitted_nodes: int,
    gang: RunningGang,
) -> int:
    """Return the nodes to admit: more only for an elastic gang, fewer once no larger gang is left.

    A gang that shrank asks for what its pods request, so no quota idles. A larger size has to wait
    if each pod requests more than was admitted.
    """
    if requests is None or job.metadata.deletion_timestamp is not None:
        return admitted_nodes
    nodes, is_elastic = requests.nodes, job.spec.elastic is not None
    if is_elastic and gang.last_job is not None:
        nodes = head_and_workers.nodes_to_ask(job.spec, gang.last_job)
    if not admitted_nodes:
        return nodes
    if nodes > admitted_nodes:
        fits_pods = grant is None or not pod_shortfall(requests, grant)
        return nodes if is_elastic and fits_pods else admitted_nodes
    is_observed = job.status.observed_generation == job.metadata.generation
    return max(nodes, gang.nodes) if is_observed else admitted_nodes


def _requests_of_gang(queue: TorchrunQueue | None, gang: RunningGang) -> GangRequests | None:
    """Return what the pods of the gang request; None without a gang.

    The spec may request more after an edit. The next gang needs an admission of its own for that.
    """
    if gang.pod is None:
        return None
    resources = NodeResources() if queue is None else queue.spec.node_resources
    return requests_of_pods(gang.nodes, gang.pod, gang.head, resources.gpu_resource_name)


def _requests(job: TorchrunJob, queue: TorchrunQueue | None) -> GangRequests | None:
    """Return what the spec requests; None without a queue."""
    if queue is None:
        return None
    return requests_of(job, queue, size_of(job.spec, queue.spec))


def _compact(tolerations: tuple[JsonObject, ...]) -> tuple[JsonObject, ...]:
    """Return the fields of the tolerations that match taints, without values that no taint has."""
    return tuple(
        {
            name: value
            for name in ("key", "operator", "value", "effect")
            if isinstance(value := toleration.get(name), str)
        }
        for toleration in tolerations
        if all(
            len(value) <= _LONGEST_KEY for value in toleration.values() if isinstance(value, str)
        )
    )


def _priority(job: TorchrunJob, queue: TorchrunQueue | None) -> int:
    """Return the priority, at most what the queue allows; a later limit of the queue counts too."""
    if queue is None:
        return job.spec.priority or 0
    priority = queue.spec.priority if job.spec.priority is None else job.spec.priority
    limit = queue.spec.limits.max_priority
    return priority if limit is None else min(priority, limit)
