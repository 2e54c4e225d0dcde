"""The classification of the job of a World by the coordinator, and its decision."""

from typing import Any

from msgspec.structs import replace

from torchrun_api.kinds.core import Pod
from torchrun_api.kinds.status import TorchrunJobStatus
from torchrun_controller.reconcile.admission.classify import Classification, classify_job
from torchrun_controller.reconcile.admission.model import (
    Decisions,
    PendingStatus,
)
from torchrun_controller.reconcile.admission.statuses import (
    JobUpdates,
    Stage,
    StatusUpdate,
)
from world import World

NOBODY: frozenset[str] = frozenset()


def classify_world(world: World, lost: frozenset[str] = NOBODY) -> Classification:
    pods = tuple(o for o in world.objects.values() if isinstance(o, Pod))
    return classify_job(world.job, world.queue, world.observed().gang.child_jobs, pods, lost)


def status_update(world: World, **decided: Any) -> StatusUpdate | None:
    jobs = JobUpdates(Decisions(**decided))
    return jobs.update(world.job, classify_world(world), world.now)


def deliver(world: World, **decided: Any) -> Stage:
    """Write the decision of the coordinator into the status of the job."""
    update = status_update(world, **decided)
    assert update is not None
    status = update.status
    assert isinstance(status, TorchrunJobStatus)
    others = tuple(c for c in world.job.status.conditions if c.type != "Admitted")
    world.job = replace(
        world.job,
        status=replace(
            world.job.status,
            conditions=(*others, *status.conditions),
            admission=status.admission,
            queue_position=status.queue_position,
        ),
    )
    return update.stage


def pending(**fields: Any) -> dict[str, PendingStatus]:
    wait = PendingStatus(
        **{"reason": "InsufficientQuota", "message": "no room", "position": 1, **fields}
    )
    return {"uid-train": wait}
