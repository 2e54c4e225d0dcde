"""What caches may hide from a decision, as they are filled by watches that lag one behind another.

A job that has begun and misses something in the caches may be gone itself, or may have a gang whose
Job is not shown yet: to a leader that has just taken over, or by a watch that is dead and has not
been noticed. What is made in its place would be a gang beside a gang. So the API server is asked
first; a plain start, or a restart after a failure that is seen, asks nothing.
"""

from typing import Any, Protocol

from torchrun_api import names
from torchrun_api.kinds import CLAIMS, JOBS, PODS, TORCHRUN_JOBS, Kind
from torchrun_controller.apply import Found, SupersededError
from torchrun_controller.reconcile.observed import Observed
from torchrun_controller.reconcile.plan import Plan
from torchrun_controller.reconcile.workers import attempt_of


class Finder(Protocol):
    """The part of the Applier that looks."""

    async def find(self, kind: Kind[Any], namespace: str, name: str) -> Found | None:
        """See `Applier.find`."""


async def settle(finder: Finder, observed: Observed, plan: Plan) -> None:
    """Look for what the plan takes for gone, where it replaces something.

    Raises SupersededError where the caches are behind, else what `Applier.find` raises.
    """
    if not _replaces(observed, plan):
        return
    meta = observed.job.metadata
    job = await finder.find(TORCHRUN_JOBS, meta.namespace, meta.name)
    if job is None or job.uid != meta.uid:
        raise SupersededError(f"TorchrunJob {meta.name!r} is gone")
    gang = names.child_job(meta.name, observed.job.status.attempt)
    if _knows_its_gang(observed) or not any(intent.kind is JOBS for intent in plan.applies):
        return
    child = await finder.find(JOBS, meta.namespace, gang)
    if child is not None and child.controller == meta.uid and not child.is_ending:
        raise SupersededError(f"Job {gang!r} is there")


def _replaces(observed: Observed, plan: Plan) -> bool:
    """Whether something is made that has been there before, as far as the status tells."""
    made = {intent.kind for intent in plan.applies if not intent.uid}
    if observed.job.status.workers is not None:
        return bool(made) and not _knows_its_gang(observed)
    return observed.job.status.phase == "Syncing" and not made.isdisjoint((CLAIMS, PODS))


def _knows_its_gang(observed: Observed) -> bool:
    """Whether the Job of the present attempt is in the cache, and stays."""
    return any(
        attempt_of(child.metadata) >= observed.job.status.attempt
        and child.metadata.deletion_timestamp is None
        for child in observed.child_jobs
    )
