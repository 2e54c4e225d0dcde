"""The gang of the present attempt: which child Job it is and how it stands."""

from torchrun_api import names
from torchrun_api.core import Job, Pod
from torchrun_api.job import LastFailure
from torchrun_api.kinds import JOBS
from torchrun_controller.reconcile.observed import Observed
from torchrun_controller.reconcile.phases import Finding
from torchrun_controller.reconcile.workers import (
    Why,
    count,
    first_reason,
    root_cause,
    scheduled,
)


def nodes_of(child: Job) -> int:
    """Workers of the gang."""
    return child.spec.completions or child.spec.parallelism


def attempt_of(job: Job) -> int:
    """Number of the attempt, from its label."""
    label = job.metadata.labels.attempt
    return int(label) if label.isdecimal() else 0


def next_attempt(observed: Observed) -> int:
    """Number for a new gang: the first, or one more than the last that was made.

    A later number whose name a foreign Job holds is skipped.
    """
    status = observed.job.status
    if status.workers is None:
        return status.attempt
    taken = {c.name for c in observed.conflicts if c.resource == JOBS.resource}
    attempt = status.attempt + 1
    while names.child_job(observed.job.metadata.name, attempt) in taken:
        attempt += 1
    return attempt


def find(child: Job, workers: tuple[Pod, ...]) -> tuple[Finding, Why]:
    """How the gang stands.

    Success is the Job's own verdict: single pods that succeeded prove nothing of the others.
    Failure is taken from the first failed pod, well before the Job says so.
    """
    nodes = nodes_of(child)
    verdicts = {c.type: c for c in child.status.conditions if c.status == "True"}
    if "Complete" in verdicts:
        return Finding.GANG_SUCCEEDED, Why("Completed", f"{nodes} of {nodes} workers succeeded")
    failure = root_cause(workers)
    if failure is not None:
        return Finding.GANG_FAILED, why_failed(failure)
    if "Failed" in verdicts:
        said = verdicts["Failed"]
        return Finding.GANG_FAILED, Why(said.reason or "JobFailed", said.message)
    if child.metadata.deletion_timestamp is not None:
        message = f"Job {child.metadata.name} is being deleted; a new attempt follows"
        return Finding.GANG_ENDING, Why("JobDeleted", message)
    counts = count(workers, nodes)
    if counts.pending == 0:
        return Finding.GANG_RUNNING, Why("WorkersRunning", f"{nodes} of {nodes} workers started")
    if child.spec.suspend:
        return Finding.GANG_STARTING, Why("JobSuspended", f"Job {child.metadata.name} is suspended")
    why = first_reason(workers)
    if why is not None:
        prefix = f"{scheduled(workers)} of {nodes} workers have a node; "
        return Finding.GANG_STARTING, Why(why.reason, prefix + why.message)
    started = nodes - counts.pending
    return Finding.GANG_STARTING, Why("WorkersStarting", f"{started} of {nodes} workers started")


def why_failed(failure: LastFailure) -> Why:
    """The root cause in a line."""
    parts = [
        f"rank {failure.rank}" if failure.rank is not None else "",
        f"node {failure.node}" if failure.node else "",
        f"signal {failure.signal}" if failure.signal else "",
        f"exit code {failure.exit_code}" if failure.exit_code is not None else "",
    ]
    facts = ", ".join(part for part in parts if part)
    return Why(failure.reason, f"{failure.message} ({facts})" if facts else failure.message)
