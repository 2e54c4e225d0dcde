"""Reads that check the caches before a decision that a stale cache would make harmful.

Watches fill the caches, and each may lag: after a change of the leader, or until a dead watch is
noticed. If a job has started and an object is missing in the caches, the job may be deleted, or the
Job of its gang may not be in the cache yet. A new object would be a second gang, and a gang that
counts as deleted might still run. So these objects are read from the API server first, also if the
caches show only the pods of a gang. A first start, and a restart after an observed failure, need no
read.

An elastic gang shrinks when some pods have no node for a while. When a dead watch of pods is
replaced, the cache shows the node of one pod before that of the next. So pods without a node are
read, too.

A job that is Suspended or Preempted gives its part of the quota back. If its Job was deleted before
the cache showed its pods, they may still run. So the pods are read before such a phase begins.
"""

from typing import Any, Protocol

from torchrun_api import names
from torchrun_api.kinds import CLAIMS, JOBS, PODS, TORCHRUN_JOBS, Kind
from torchrun_controller.client.reads import LiveObject
from torchrun_controller.client.write_errors import SupersededError
from torchrun_controller.reconcile.gang.gang import stale_attempts
from torchrun_controller.reconcile.model.messages import count_of
from torchrun_controller.reconcile.model.observed import Observed
from torchrun_controller.reconcile.model.plan import Plan
from torchrun_controller.reconcile.model.times import find_end
from torchrun_controller.reconcile.pods.lifecycle import alive, attempt_of


class Finder(Protocol):
    """Reads single objects."""

    async def find(self, kind: Kind[Any], namespace: str, name: str) -> LiveObject | None:
        """See `LiveReader.find`."""


class Reader(Finder, Protocol):
    """Reads single objects and the pods of a job."""

    async def find_workers(self, namespace: str, job: str) -> frozenset[str]:
        """See `LiveReader.find_workers`."""


async def verify(reader: Reader, observed: Observed, plan: Plan) -> None:
    """Verify with the API server that objects are gone, if the plan replaces them.

    Raises SupersededError if the caches are behind, and what `LiveReader` raises.
    """
    if observed.job.spec.elastic is not None and _creates_gang(plan):
        await _verify_unscheduled(reader, observed)
    if _reports_no_pods(observed, plan):
        await _verify_no_pods(reader, observed)
    if not _is_replacement(observed, plan):
        return
    meta = observed.job.metadata
    job = await reader.find(TORCHRUN_JOBS, meta.namespace, meta.name)
    if job is None or job.uid != meta.uid:
        raise SupersededError(f"TorchrunJob {meta.name!r} is gone")
    gang = names.child_job(meta.name, _newest_attempt(observed))
    if _has_current_gang(observed) or not (_creates_gang(plan) or _ends_attempt(observed, plan)):
        return
    child = await reader.find(JOBS, meta.namespace, gang)
    if child is not None and child.controller == meta.uid and not child.is_ending:
        raise SupersededError(f"Job {gang!r} exists")


async def _verify_unscheduled(finder: Finder, observed: Observed) -> None:
    """Raise SupersededError if a pod without a node has changed since it was cached."""
    for pod in observed.gang.workers:
        if pod.spec.node_name or not alive(pod):
            continue
        live_pod = await finder.find(PODS, pod.metadata.namespace, pod.metadata.name)
        if live_pod is None or live_pod.version != pod.metadata.resource_version:
            raise SupersededError(f"pod {pod.metadata.name!r} has changed since it was seen")


async def _verify_no_pods(reader: Reader, observed: Observed) -> None:
    """Raise SupersededError if the gangs of the job have a pod that the cache does not show.

    Pods that it shows are on lost nodes.
    """
    meta, gang = observed.job.metadata, observed.gang
    cached = {pod.metadata.uid for pod in (*gang.workers, *gang.stale_pods)}
    if unseen := await reader.find_workers(meta.namespace, meta.name) - cached:
        raise SupersededError(f"the cache of pods does not show {count_of(len(unseen), 'pod')}")


def _reports_no_pods(observed: Observed, plan: Plan) -> bool:
    """Whether the new status is the first to report that no pod of a gang runs any more."""
    if plan.status is None or plan.status.phase not in ("Suspended", "Preempted"):
        return False
    status = observed.job.status
    has_had_gang = status.workers is not None or status.admission is not None
    return has_had_gang and status.phase != plan.status.phase


def _creates_gang(plan: Plan) -> bool:
    return any(intent.kind is JOBS and not intent.uid for intent in plan.applies)


def _is_replacement(observed: Observed, plan: Plan) -> bool:
    """Whether the plan creates or ends what already existed according to the status or to pods."""
    created_kinds = {intent.kind for intent in plan.applies if not intent.uid}
    if observed.job.status.workers is not None or stale_attempts(observed.job, observed.gang):
        return (bool(created_kinds) or _ends_attempt(observed, plan)) and not _has_current_gang(
            observed
        )
    return observed.job.status.phase == "Syncing" and not created_kinds.isdisjoint((CLAIMS, PODS))


def _ends_attempt(observed: Observed, plan: Plan) -> bool:
    """Whether the new status records the end of the current attempt, or a failed job."""
    if plan.status is None:
        return False
    if plan.status.phase == "Failed":
        return True
    before, number = observed.job.status, observed.job.status.attempt
    is_recorded = find_end(before.attempts, number) is not None
    return not is_recorded and find_end(plan.status.attempts, number) is not None


def _newest_attempt(observed: Observed) -> int:
    """Return the number of the newest gang, whose Job the cache may not show."""
    job = observed.job
    return max([job.status.attempt, *stale_attempts(job, observed.gang)])


def _has_current_gang(observed: Observed) -> bool:
    """Whether the Job of the current attempt is in the cache and not being deleted."""
    newest = _newest_attempt(observed)
    return any(
        attempt_of(child) >= newest and child.metadata.deletion_timestamp is None
        for child in observed.gang.child_jobs
    )
