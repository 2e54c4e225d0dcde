"""All gang schedulers. Another one is a file with its GangScheduler, and a line here."""

from collections.abc import Mapping
from types import MappingProxyType

from torchrun_api.admission import GangScheduling
from torchrun_controller.reconcile.schedulers.coscheduling import COSCHEDULING
from torchrun_controller.reconcile.schedulers.kai import KAI
from torchrun_controller.reconcile.schedulers.kueue import KUEUE
from torchrun_controller.reconcile.schedulers.native import NATIVE
from torchrun_controller.reconcile.schedulers.none import NONE
from torchrun_controller.reconcile.schedulers.scheduler import GangScheduler
from torchrun_controller.reconcile.schedulers.volcano import VOLCANO

SCHEDULERS: Mapping[GangScheduling, GangScheduler] = MappingProxyType(
    {one.name: one for one in (KAI, VOLCANO, COSCHEDULING, NATIVE, KUEUE, NONE)}
)
