"""No gang scheduler: each pod is scheduled alone, and the start gate waits for the last one."""

from torchrun_api.kinds.gang_schedulers import GANG_SCHEDULERS
from torchrun_controller.reconcile.schedulers.scheduler import (
    GangObjects,
    GangScheduler,
    ScheduledGang,
    topology_affinity,
)


def build(gang: ScheduledGang) -> GangObjects:
    """Build no group. Topology is pod affinity."""
    return GangObjects(template=topology_affinity(gang.template, gang.labels, gang.topology))


NONE = GangScheduler(api=GANG_SCHEDULERS["none"], build=build)
