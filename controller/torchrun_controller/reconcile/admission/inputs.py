"""Builds the ClusterState of a decision from jobs, queues and machines of the API."""

from collections.abc import Collection, Iterable, Mapping
from datetime import datetime, timedelta
from math import floor

from msgspec import Struct
from msgspec.structs import replace

from torchrun_api.json import JsonObject
from torchrun_api.kinds import core
from torchrun_api.kinds.admission import Quota
from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.quantity import QuantityError, parse
from torchrun_api.kinds.queue import TorchrunQueue
from torchrun_api.kinds.status import TorchrunJobStatus
from torchrun_controller.reconcile.admission import nodes as node_rules
from torchrun_controller.reconcile.admission.classify import Classification
from torchrun_controller.reconcile.admission.model import (
    ClusterState,
    Queue,
    QuotaLimits,
    RoundRobinState,
    Workload,
)
from torchrun_controller.reconcile.model.times import running_since, seconds_run
from torchrun_controller.reconcile.spec.admission_status import PREEMPTED, takes_part

DAY = timedelta(days=1)


class ClassifiedJob(Struct, frozen=True):
    """A job with its classification."""

    job: TorchrunJob
    classification: Classification


def cluster_state(
    queues: Iterable[TorchrunQueue],
    jobs: Iterable[ClassifiedJob],
    orphans: Iterable[Workload],
    nodes: tuple[core.Node, ...] | None,
    now: datetime,
    cohort_namespaces: frozenset[str] = frozenset(),
    overhead: Mapping[str, int] = node_rules.NO_OVERHEAD,
) -> ClusterState:
    """Build the state. `orphans` run although their job is gone; `nodes` is None if unknown.

    Queues of `cohort_namespaces` may share a cohort across namespaces. `overhead` is what other
    pods take of each machine.
    """
    queues = tuple(queues)
    taints = node_rules.find_taints(nodes or ())
    selectors = _TaintSelectors(taints)
    protected = {
        (queue.metadata.namespace, queue.metadata.name): queue.spec.quota.min_run_seconds
        for queue in queues
        if queue.spec.quota is not None
    }
    return ClusterState(
        nodes=None
        if nodes is None
        else tuple(node_rules.node_capacity(node, taints, overhead) for node in nodes),
        queues=tuple(queue_input(queue) for queue in queues if takes_part(queue.spec)),
        workloads=(*_with_gpus(orphans, queues), *_workloads(jobs, selectors, protected, now)),
        cohort_namespaces=tuple(sorted(cohort_namespaces)),
    )


def _with_gpus(
    orphans: Iterable[Workload], queues: tuple[TorchrunQueue, ...]
) -> Iterable[Workload]:
    """Yield the workloads with their GPUs: their queue says which of their requests are GPUs."""
    gpu_names = {
        (queue.metadata.namespace, queue.metadata.name): queue.spec.node_resources.gpu_resource_name
        for queue in queues
    }
    for workload in orphans:
        gpu = gpu_names.get((workload.namespace, workload.queue), "")
        yield replace(workload, gpus=workload.pod.get(gpu, 0))


def leave_out(state: ClusterState, uids: Collection[str]) -> ClusterState:
    """Return the state of a decision that changes nothing of these workloads.

    What they have been admitted for still counts; those that wait get no room and no turn.
    """
    if not uids:
        return state
    workloads = (
        replace(workload, nodes=workload.admitted, is_fixed=True)
        if workload.uid in uids
        else workload
        for workload in state.workloads
        if workload.admitted or workload.uid not in uids
    )
    return replace(state, workloads=tuple(workloads))


def queue_input(queue: TorchrunQueue) -> Queue:
    """Return the queue with its quota in integers and its last running weights."""
    spec, meta, admission = queue.spec, queue.metadata, queue.status.admission
    paused_reason = queue.invalid
    if meta.deletion_timestamp is not None:
        paused_reason = "The queue is being deleted."
    limits = QuotaLimits()
    try:
        limits = _limits(spec.quota or Quota())
    except QuantityError as error:
        paused_reason = f"spec.quota is invalid: {error}."
    round_robin = None
    if admission is not None:
        round_robin = RoundRobinState(weight=admission.weight, current=admission.current)
    return Queue(
        namespace=meta.namespace,
        name=meta.name,
        weight=spec.weight,
        quota=limits,
        cohort=spec.cohort or "",
        paused_reason=paused_reason,
        round_robin=round_robin,
    )


def _limits(quota: Quota) -> QuotaLimits:
    return QuotaLimits(
        nodes=quota.nodes,
        gpus=quota.gpus,
        cpu=None if quota.cpu is None else floor(parse(quota.cpu) * 1000),
        memory=None if quota.memory is None else floor(parse(quota.memory)),
        jobs=quota.jobs,
    )


def _workloads(
    jobs: Iterable[ClassifiedJob],
    selectors: "_TaintSelectors",
    protected: Mapping[tuple[str, str], int],
    now: datetime,
) -> Iterable[Workload]:
    """Yield the workloads; `protected` is the minRunSeconds of queues by namespace and name."""
    for classified in jobs:
        workload, classification = classified.classification.workload, classified.classification
        if workload is None:
            continue
        labels = selectors.select(classification.tolerations, workload.pod)
        if labels:
            workload = replace(workload, node_selector=workload.node_selector | labels)
        if classification.deadline is not None:
            seconds_left = classification.deadline.total_seconds() - seconds_run(
                classified.job.status, now
            )
            workload = replace(workload, seconds_left=max(seconds_left, 0.0))
        if workload.admitted:
            least = protected.get((workload.namespace, workload.queue), 0)
            workload = _with_stakes(workload, classified.job.status, least, now)
        yield workload


def _with_stakes(
    workload: Workload, status: TorchrunJobStatus, least: int, now: datetime
) -> Workload:
    """Return the workload with what its preemption depends on; `least` is its minRunSeconds.

    A checkpoint of an earlier gang counts from the start of the present one, which has loaded it.
    """
    since, checkpoint = running_since(status), status.last_checkpoint
    ran = 0.0 if since is None else max((now - since).total_seconds(), 0.0)
    unsaved = None
    if checkpoint is not None:
        unsaved = min(max((now - checkpoint.time).total_seconds(), 0.0), ran)
    return replace(
        workload,
        ran_seconds=ran,
        unsaved_seconds=unsaved,
        saved_step=None if checkpoint is None else checkpoint.step,
        preemptions=sum(
            end.reason == PREEMPTED and end.end_time is not None and now - end.end_time < DAY
            for end in status.attempts
        ),
        protected_seconds=0.0 if since is None else max(least - ran, 0.0),
    )


class _TaintSelectors:
    """A cache of the node labels that jobs select because of taints; most jobs are alike."""

    def __init__(self, taints: frozenset[core.Taint]) -> None:
        self._taints = taints
        self._selectors: dict[object, dict[str, str]] = {}

    def select(self, tolerations: tuple[JsonObject, ...], pod: dict[str, int]) -> dict[str, str]:
        """Return the labels for a job with these tolerations whose pods request this."""
        key = str(tolerations), tuple(pod)
        if key not in self._selectors:
            self._selectors[key] = node_rules.taint_selector(self._taints, tolerations, pod)
        return self._selectors[key]
