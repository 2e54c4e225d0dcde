"""The writes of a decision, completed: what earlier gangs have left, without refused writes."""

from collections.abc import Callable
from typing import TypeAlias

from msgspec.structs import replace

from torchrun_controller.reconcile.gang import cleanup
from torchrun_controller.reconcile.gang.decision import Writes
from torchrun_controller.reconcile.job import refusals
from torchrun_controller.reconcile.model.observed import Observed
from torchrun_controller.reconcile.model.plan import Delete
from torchrun_controller.reconcile.schedulers import groups

Leftovers: TypeAlias = Callable[[Observed, Writes], tuple[Delete, ...]]


def resized_jobs(observed: Observed, writes: Writes) -> tuple[Delete, ...]:
    """Delete the Jobs that a resize has replaced."""
    return cleanup.delete_resized_jobs(observed.job, observed.gang, writes.deletes)


def unused_groups(observed: Observed, writes: Writes) -> tuple[Delete, ...]:
    """Delete the groups and suspended Jobs of finished gangs, which would reserve capacity."""
    return groups.delete_unused(observed.job, observed.gang, writes.applies)


def headless_jobs(observed: Observed, _: Writes) -> tuple[Delete, ...]:
    """Delete the Jobs of workers whose head has no Job."""
    return cleanup.delete_headless_jobs(observed.gang)


# What earlier gangs may have left behind, whatever the step decides: a controller may have died
# before it could delete them.
LEFTOVERS: tuple[Leftovers, ...] = (resized_jobs, unused_groups, headless_jobs)


def complete(observed: Observed, writes: Writes) -> Writes:
    """Return the writes with the deletion of leftovers, without those that are refused."""
    leftovers = (delete for find in LEFTOVERS for delete in find(observed, writes))
    return replace(
        writes,
        applies=refusals.accepted_applies(observed.refused, writes.applies),
        deletes=refusals.accepted_deletes(observed.refused, (*writes.deletes, *leftovers)),
    )
