"""A gang whose head has pods of its own: two child Jobs that are made, live and go as one.

That of the workers is made first. That of the head is the one that counts: it bears the number of
nodes and all that a child Job remembers, and no launcher is let through its gate before it is
there. So a process may die between the two, and what it leaves behind never ran a rank.
"""

from torchrun_api import names
from torchrun_api.core import Job
from torchrun_api.meta import Condition
from torchrun_controller.reconcile.model.observed import Observed
from torchrun_controller.reconcile.pods.lifecycle import attempt_of


def nodes_of(child: Job) -> int:
    """Workers of the gang, its head included."""
    said = names.number_in(child.metadata.annotations.nodes)
    return said or child.spec.completions or child.spec.parallelism


def has_head(child: Job) -> bool:
    """Whether the Job is that of a head, with its workers in another."""
    return child.metadata.labels.role == names.HEAD


def workers_job(observed: Observed) -> Job | None:
    """The Job of the workers of the present gang, where its head has one of its own."""
    present = attempt_of(observed.gang.current_job.metadata)
    found = (job for job in observed.gang.worker_jobs if attempt_of(job.metadata) == present)
    return next(found, None)


def jobs_of(observed: Observed) -> tuple[Job, ...]:
    """The Jobs of the present gang."""
    workers = workers_job(observed)
    return (observed.gang.current_job, *(() if workers is None else (workers,)))


def is_whole(observed: Observed) -> bool:
    """Whether all of the present gang is there: somebody may have deleted the workers' Job."""
    if not has_head(observed.gang.current_job):
        return True
    workers = workers_job(observed)
    return workers is not None and not workers.metadata.terminating


def being_deleted(observed: Observed) -> str:
    """Name of a Job of the gang that somebody deletes or has deleted, "" if nobody does."""
    child = observed.gang.current_job
    if child.metadata.terminating:
        return child.metadata.name
    whole = is_whole(observed)
    return (
        "" if whole else names.workers_job(observed.job.metadata.name, attempt_of(child.metadata))
    )


def failed(observed: Observed) -> tuple[Job, Condition] | None:
    """A Job of the gang that has failed, with its word."""
    found = (
        (job, condition)
        for job in jobs_of(observed)
        for condition in job.status.conditions
        if (condition.type, condition.status) == ("Failed", "True")
    )
    return next(found, None)


def head_has_succeeded(observed: Observed) -> bool:
    """Whether the head's pod says so: its Job will, and how its workers end matters no more."""
    return has_head(observed.gang.current_job) and any(
        pod.metadata.labels.role == names.HEAD and pod.status.phase == "Succeeded"
        for pod in observed.gang.workers
    )


def headless(observed: Observed) -> tuple[Job, ...]:
    """Jobs of workers whose head's Job is gone, or was never made."""
    heads = {attempt_of(child.metadata) for child in observed.gang.child_jobs}
    return tuple(
        job
        for job in observed.gang.worker_jobs
        if attempt_of(job.metadata) not in heads and not job.metadata.terminating
    )
