"""Reads that check the caches before a decision that a stale cache would make harmful.

Caches are filled by watches, and each may lag. If a job has started and one of its objects is
missing in the caches, the job may be gone itself, or the Job of its gang may not be shown yet:
after a change of the leader, or while a dead watch is not noticed. A new object would then be a
second gang beside the first, and a gang that counts as deleted may still run. So the API server is
asked first. A plain start, or a restart after an observed failure, asks nothing.

An elastic gang shrinks when some workers have no node for a while. After a watch of pods that was
dead for that time, the cache shows one worker's node before the next one's. So workers without a
node are read, too.
"""

from typing import Any, Protocol

from torchrun_api import names
from torchrun_api.kinds import CLAIMS, JOBS, PODS, TORCHRUN_JOBS, Kind
from torchrun_controller.client.apply import LiveObject, SupersededError
from torchrun_controller.reconcile.model.observed import Observed
from torchrun_controller.reconcile.model.plan import Plan
from torchrun_controller.reconcile.pods.lifecycle import alive, attempt_of


class Finder(Protocol):
    """The part of the Applier that reads."""

    async def find(self, kind: Kind[Any], namespace: str, name: str) -> LiveObject | None:
        """See `Applier.find`."""


async def settle(finder: Finder, observed: Observed, plan: Plan) -> None:
    """Read what the plan takes for gone, if the plan replaces it.

    Raises SupersededError if the caches are behind, and what `Applier.find` raises.
    """
    if observed.job.spec.elastic is not None and _makes_gang(plan):
        await _settle_places(finder, observed)
    if not _replaces(observed, plan):
        return
    meta = observed.job.metadata
    job = await finder.find(TORCHRUN_JOBS, meta.namespace, meta.name)
    if job is None or job.uid != meta.uid:
        raise SupersededError(f"TorchrunJob {meta.name!r} is gone")
    gang = names.child_job(meta.name, observed.job.status.attempt)
    if _knows_its_gang(observed) or not (_makes_gang(plan) or _gives_up(observed, plan)):
        return
    child = await finder.find(JOBS, meta.namespace, gang)
    if child is not None and child.controller == meta.uid and not child.is_ending:
        raise SupersededError(f"Job {gang!r} is there")


async def _settle_places(finder: Finder, observed: Observed) -> None:
    """Check that workers without a node are as the cache shows them."""
    for pod in observed.gang.workers:
        if pod.spec.node_name or not alive(pod):
            continue
        found = await finder.find(PODS, pod.metadata.namespace, pod.metadata.name)
        if found is None or found.version != pod.metadata.resource_version:
            raise SupersededError(f"pod {pod.metadata.name!r} has changed since it was seen")


def _makes_gang(plan: Plan) -> bool:
    return any(intent.kind is JOBS and not intent.uid for intent in plan.applies)


def _replaces(observed: Observed, plan: Plan) -> bool:
    """Whether the plan creates, or gives up, what existed before according to the status."""
    made = {intent.kind for intent in plan.applies if not intent.uid}
    if observed.job.status.workers is not None:
        return (bool(made) or _gives_up(observed, plan)) and not _knows_its_gang(observed)
    return observed.job.status.phase == "Syncing" and not made.isdisjoint((CLAIMS, PODS))


def _gives_up(observed: Observed, plan: Plan) -> bool:
    """Whether the new status records the end of the present gang or of the job."""
    if plan.status is None:
        return False
    before = {attempt.number for attempt in observed.job.status.attempts}
    number = observed.job.status.attempt
    ends = any(attempt.number == number for attempt in plan.status.attempts)
    return plan.status.phase == "Failed" or (ends and number not in before)


def _knows_its_gang(observed: Observed) -> bool:
    """Whether the Job of the present attempt is in the cache and not being deleted."""
    return any(
        attempt_of(child.metadata) >= observed.job.status.attempt
        and child.metadata.deletion_timestamp is None
        for child in observed.gang.child_jobs
    )
