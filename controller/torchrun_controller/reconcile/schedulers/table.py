"""All gang schedulers, and the choice: the queue's, else the pods' scheduler, else the cluster's.

A new one needs a file with its GangScheduler, and a line here. Its names are an entry in
`api/torchrun_api/kinds/gang_schedulers.py`, and its permissions are a rule in
`manifests/rbac/role.yaml`.

A gang scheduler is never chosen only because it is installed. The exception is the cluster's own
scheduler, which schedules all pods that name no other.
"""

from collections.abc import Mapping
from types import MappingProxyType

from msgspec import Struct

from torchrun_api.kinds.gang_schedulers import GangScheduling
from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.queue import TorchrunQueue
from torchrun_controller.reconcile.model.conditions import Reason
from torchrun_controller.reconcile.model.observed import Installed
from torchrun_controller.reconcile.schedulers.coscheduling import COSCHEDULING
from torchrun_controller.reconcile.schedulers.kai import KAI
from torchrun_controller.reconcile.schedulers.kueue import KUEUE
from torchrun_controller.reconcile.schedulers.native import NATIVE
from torchrun_controller.reconcile.schedulers.none import NONE
from torchrun_controller.reconcile.schedulers.scheduler import GangScheduler
from torchrun_controller.reconcile.schedulers.volcano import VOLCANO
from torchrun_controller.reconcile.spec.errors import InvalidSpecError

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
_BY_POD_SCHEDULER = {
    scheduler.api.pod_scheduler: name
    for name, scheduler in SCHEDULERS.items()
    if scheduler.api.pod_scheduler
}
_DEFAULT_SCHEDULER = "default-scheduler"


class Choice(Struct, frozen=True, kw_only=True):
    """The gang scheduler of a job.

    `scheduler` is the schedulerName of the pods, "" for the cluster's default. `missing` is why no
    gang can be created until the gang scheduler is installed.
    """

    gang: GangScheduling
    scheduler: str = ""
    missing: Reason | None = None


def choose(
    queue: TorchrunQueue, installed: Installed | None, job: TorchrunJob | None = None
) -> Choice:
    """Choose for a job of the queue, or for all its jobs that name no scheduler themselves.

    Raises:
        InvalidSpecError: the pods name the scheduler of another gang scheduler, or the gang
            scheduler refuses the queue.
    """
    name, requested_gang = _scheduler_name(queue, job), queue.spec.scheduling.gang
    if requested_gang is not None:
        _check_scheduler(queue, requested_gang, name)
        SCHEDULERS[requested_gang].check_queue(queue)
    gang = requested_gang or _BY_POD_SCHEDULER.get(name) or _default_gang(name, installed)
    return Choice(
        gang=gang,
        scheduler=name or SCHEDULERS[gang].api.pod_scheduler,
        missing=_missing_reason(queue, gang, installed),
    )


def _scheduler_name(queue: TorchrunQueue, job: TorchrunJob | None) -> str:
    """Return the schedulerName of the workers: scheduling.scheduler wins over the pod templates."""
    candidates = (
        queue.spec.scheduling.scheduler,
        job.spec.pod_template.spec.get("schedulerName") if job else None,
        queue.spec.pod_template.spec.get("schedulerName"),
    )
    return next((name for name in candidates if isinstance(name, str) and name), "")


def _default_gang(name: str, installed: Installed | None) -> GangScheduling:
    is_default = name in ("", _DEFAULT_SCHEDULER)
    return "native" if is_default and _is_served("native", installed) else "none"


def _is_served(gang: GangScheduling, installed: Installed | None) -> bool:
    return installed is not None and any(map(installed.serves, SCHEDULERS[gang].kinds))


def _check_scheduler(queue: TorchrunQueue, gang: GangScheduling, name: str) -> None:
    """Refuse pods of another scheduler. The default scheduler may have the coscheduling plugin."""
    scheduled_by = SCHEDULERS[gang].api.pods_scheduled_by
    if scheduled_by == "any" or _BY_POD_SCHEDULER.get(name) == gang:
        return
    if name in _BY_POD_SCHEDULER or (name == _DEFAULT_SCHEDULER and scheduled_by == "itself"):
        raise InvalidSpecError(
            f"TorchrunQueue {queue.metadata.name} sets scheduling.gang to {gang}, but its pods are"
            f" scheduled by {name} (scheduling.scheduler or podTemplate). Set scheduling.gang to"
            f" {_BY_POD_SCHEDULER.get(name, 'native')} or none, or choose another scheduler."
        )


def _missing_reason(
    queue: TorchrunQueue, gang: GangScheduling, installed: Installed | None
) -> Reason | None:
    scheduler = SCHEDULERS[gang]
    if not scheduler.kinds or _is_served(gang, installed):
        return None
    if installed is None:
        message = (
            f"It is not known yet whether {gang} is installed: API discovery has not succeeded."
            " See /readyz of the controller."
        )
        return Reason("GangSchedulerUnknown", message)
    resource = scheduler.kinds[0].resource
    message = (
        f"TorchrunQueue {queue.metadata.name} uses the gang scheduler {gang}, but the API server"
        f" does not serve {resource}. {scheduler.install_hint}, or set spec.scheduling.gang of the"
        " queue to none."
    )
    return Reason("GangSchedulerMissing", message)
