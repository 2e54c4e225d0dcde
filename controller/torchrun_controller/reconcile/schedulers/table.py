"""All gang schedulers. A new one needs a file with its GangScheduler, and a line here.

Its names are an entry in `api/torchrun_api/gang_schedulers.py`, and its permissions are a rule in
`manifests/rbac/role.yaml`.
"""

from collections.abc import Mapping
from types import MappingProxyType

from torchrun_api.gang_schedulers import GangScheduling
from torchrun_controller.reconcile.schedulers.coscheduling import COSCHEDULING
from torchrun_controller.reconcile.schedulers.kai import KAI
from torchrun_controller.reconcile.schedulers.kueue import KUEUE
from torchrun_controller.reconcile.schedulers.native import NATIVE
from torchrun_controller.reconcile.schedulers.none import NONE
from torchrun_controller.reconcile.schedulers.scheduler import GangScheduler
from torchrun_controller.reconcile.schedulers.volcano import VOLCANO

SCHEDULERS: Mapping[GangScheduling, GangScheduler] = MappingProxyType(
    {
        scheduler.api.name: scheduler
        for scheduler in (KAI, VOLCANO, COSCHEDULING, NATIVE, KUEUE, NONE)
    }
)

# Watched and permitted where they are served.
GROUP_KINDS = tuple(kind for scheduler in SCHEDULERS.values() for kind in scheduler.kinds)
# Groups that the scheduler creates itself: the controller reads them only.
OBSERVED_GROUP_KINDS = tuple(
    kind
    for scheduler in SCHEDULERS.values()
    if not scheduler.creates_groups
    for kind in scheduler.kinds
)
# API groups that discovery reads.
API_GROUPS = frozenset(
    kind.api_version.partition("/")[0]
    for scheduler in SCHEDULERS.values()
    for kind in (*scheduler.kinds, *scheduler.other_kinds)
)
