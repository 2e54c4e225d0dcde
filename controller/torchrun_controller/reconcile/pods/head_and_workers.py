"""The Jobs of a gang: one, or two where the head has pods of its own.

The Job of the workers is created before the Job of the head. The Job of the head is the child Job
that counts: its annotations have the number of nodes and the history of the attempts, and no
launcher passes its gate before it exists. A controller that dies between the two creations leaves
a Job that never ran a rank.
"""

from datetime import datetime

from torchrun_api import names
from torchrun_api.kinds.core import Job, Pod
from torchrun_api.kinds.job import TorchrunJob, TorchrunJobSpec
from torchrun_api.kinds.meta import Condition
from torchrun_controller.reconcile.model.conditions import find_condition, find_true
from torchrun_controller.reconcile.model.observed import ObservedGang
from torchrun_controller.reconcile.pods.lifecycle import attempt_of, may_create_pods

# The finalizer of a pod that its Job has not counted yet as succeeded or failed.
TRACKED = "batch.kubernetes.io/job-tracking"


def nodes_of(child: Job) -> int:
    """Return the number of nodes of the gang, its head included.

    Users can edit the annotation, and create a Job of any size: the number is at most MOST_NODES.
    """
    annotations, spec = child.metadata.annotations, child.spec
    annotated_nodes = (
        names.number_in(annotations.nodes, most=names.MOST_NODES) if has_head(child) else 0
    )
    return annotated_nodes or min(spec.completions or spec.parallelism, names.MOST_NODES)


def requested_nodes(child: Job) -> int:
    """Return the numNodes that the gang was created for: more than its nodes if it shrank."""
    return names.number_in(child.metadata.annotations.wanted_nodes, nodes_of(child))


def nodes_to_ask(spec: TorchrunJobSpec, child: Job) -> int:
    """Return the nodes that the gang of an elastic job after this one asks for at first.

    A gang that shrank stays as small, unless numNodes or minNodes was changed.
    """
    assert spec.elastic is not None
    assert spec.num_nodes is not None
    if requested_nodes(child) != spec.num_nodes:
        return spec.num_nodes
    return min(max(nodes_of(child), spec.elastic.min_nodes), spec.elastic.max_nodes)


def has_head(child: Job) -> bool:
    """Whether the Job is the Job of a head, whose workers are in another Job."""
    return child.metadata.labels.role == names.HEAD


def find_workers_job(gang: ObservedGang) -> Job | None:
    """Return the Job of the workers of the present gang, if its head has a separate Job."""
    attempt = attempt_of(gang.current_job)
    jobs = (job for job in gang.worker_jobs if attempt_of(job) == attempt)
    return next(jobs, None)


def jobs_of(gang: ObservedGang) -> tuple[Job, ...]:
    """Return the Jobs of the present gang, the Job of its head first."""
    workers = find_workers_job(gang)
    return (gang.current_job, *(() if workers is None else (workers,)))


def claims_of(gang: ObservedGang) -> frozenset[str]:
    """Return the names of the PVCs that the pods of the present gang mount, whatever the spec."""
    volumes = (volume for job in jobs_of(gang) for volume in job.spec.template.spec.volumes)
    sources = (volume.persistent_volume_claim for volume in volumes)
    return frozenset(source.claim_name for source in sources if source is not None)


def is_whole(gang: ObservedGang) -> bool:
    """Whether no Job of the present gang is missing: a user may delete the Job of the workers."""
    if not has_head(gang.current_job):
        return True
    workers = find_workers_job(gang)
    return workers is not None and not workers.metadata.terminating


def find_deleted_job(job: TorchrunJob, gang: ObservedGang) -> str:
    """Return the name of a Job of the gang that is being deleted or is gone, "" for none."""
    child = gang.current_job
    if child.metadata.terminating:
        return child.metadata.name
    if is_whole(gang):
        return ""
    return names.workers_job(job.metadata.name, attempt_of(child))


def resumption_of(gang: ObservedGang) -> datetime | None:
    """Return when the child Job was last suspended or resumed; None if it never was."""
    suspended = find_condition(gang.current_job.status.conditions, "Suspended")
    return suspended.last_transition_time if suspended is not None else None


def pods_since_resumption(gang: ObservedGang) -> tuple[Pod, ...]:
    """Return the workers without those that a suspension of the child Job deletes.

    The Job controller does not count these as failed either.
    """
    return tuple(pod for pod in gang.workers if not is_from_before_suspension(gang, pod))


def is_from_before_suspension(gang: ObservedGang, pod: Pod) -> bool:
    """Whether a suspension of the present child Job deletes the pod, which the Job has created.

    The Job controller removes its finalizer from such a pod before it deletes it, so that the pod
    does not count as failed. No other pod that is being deleted loses the finalizer before it has
    ended or its Job has (job_controller.go of Kubernetes, deleteJobPods). Times prove nothing: that
    of the suspension is from another clock than that of the pod.
    """
    if not gang.child_jobs or not pod.metadata.terminating:
        return False
    return (
        attempt_of(pod) == attempt_of(gang.current_job)
        and TRACKED not in pod.metadata.finalizers
        and all(may_create_pods(job) for job in jobs_of(gang))
    )


def find_failed_job(gang: ObservedGang) -> tuple[Job, Condition] | None:
    """Return a Job of the gang that has failed, with its condition Failed."""
    for job in jobs_of(gang):
        condition = find_true(job.status.conditions, "Failed")
        if condition is not None:
            return job, condition
    return None


def have_all_failed(gang: ObservedGang) -> bool:
    """Whether all Jobs of the gang have failed."""
    return all(find_true(job.status.conditions, "Failed") for job in jobs_of(gang))


def head_has_succeeded(gang: ObservedGang) -> bool:
    """Whether the pod of the head has succeeded. Its workers no longer matter then."""
    return has_head(gang.current_job) and any(
        pod.metadata.labels.role == names.HEAD and pod.status.phase == "Succeeded"
        for pod in gang.workers
    )


def find_headless_jobs(gang: ObservedGang) -> tuple[Job, ...]:
    """Return the Jobs of workers whose head has no Job: it is gone, or was never created."""
    heads = {attempt_of(child) for child in gang.child_jobs}
    return tuple(
        job
        for job in gang.worker_jobs
        if attempt_of(job) not in heads and not job.metadata.terminating
    )
