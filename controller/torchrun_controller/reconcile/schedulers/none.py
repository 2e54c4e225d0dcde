"""No gang scheduler: each pod is placed by itself, and the start gate waits for the last."""

from torchrun_controller.reconcile.schedulers.affinity import near_each_other
from torchrun_controller.reconcile.schedulers.scheduler import Gang, GangObjects, GangScheduler


def build(gang: Gang) -> GangObjects:
    """Topology is pod affinity; no group."""
    return GangObjects(template=near_each_other(gang.template, gang.labels, gang.topology))


NONE = GangScheduler(
    name="none",
    build=build,
)
