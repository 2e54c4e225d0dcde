"""Which gang scheduler: by the queue's word, else by the pods' scheduler, else by what is there.

Nothing is chosen that the pods are not scheduled by: what is merely installed counts only where it
is the cluster's own scheduler, which schedules pods that name no other.
"""

from msgspec import Struct

from torchrun_api import names
from torchrun_api.admission import GangScheduling
from torchrun_api.job import TorchrunJob
from torchrun_api.queue import TorchrunQueue
from torchrun_controller.reconcile.model.conditions import Reason
from torchrun_controller.reconcile.model.installed import Installed
from torchrun_controller.reconcile.schedulers.table import SCHEDULERS
from torchrun_controller.reconcile.spec.errors import InvalidSpecError

_BY_NAME = {one.pod_scheduler: name for name, one in SCHEDULERS.items() if one.pod_scheduler}
_OWN = "default-scheduler"


class Choice(Struct, frozen=True, kw_only=True):
    """`scheduler` is the name that the pods shall bear, "" for what the cluster gives them.

    `missing`: why no gang can be made now; that heals by itself once it is there.
    """

    gang: GangScheduling
    scheduler: str = ""
    missing: Reason | None = None


def choose(
    queue: TorchrunQueue, installed: Installed | None, job: TorchrunJob | None = None
) -> Choice:
    """The choice for a job of the queue, or for any that has no scheduler of its own.

    Raises:
        InvalidSpecError: the pods' scheduler is known to be another.
    """
    named, wanted = _scheduler_name(queue, job), queue.spec.scheduling.gang
    if wanted is not None:
        _check(queue, wanted, named)
    if wanted == "kueue":
        _check_local_queue(queue)
    gang = wanted or _BY_NAME.get(named) or _of_the_cluster(named, installed)
    return Choice(
        gang=gang,
        scheduler=named or SCHEDULERS[gang].pod_scheduler,
        missing=_missing(queue, gang, installed),
    )


def _scheduler_name(queue: TorchrunQueue, job: TorchrunJob | None) -> str:
    """As the workers' template has it: scheduling.scheduler stands above the pod templates."""
    named = (
        queue.spec.scheduling.scheduler,
        job.spec.pod_template.spec.get("schedulerName") if job else None,
        queue.spec.pod_template.spec.get("schedulerName"),
    )
    return next((name for name in named if isinstance(name, str) and name), "")


def _of_the_cluster(named: str, installed: Installed | None) -> GangScheduling:
    own = named in ("", _OWN)
    return "native" if own and _served("native", installed) else "none"


def _served(gang: GangScheduling, installed: Installed | None) -> bool:
    return installed is not None and any(map(installed.serves, SCHEDULERS[gang].kinds))


def _check(queue: TorchrunQueue, wanted: GangScheduling, named: str) -> None:
    """Kueue and none go with any scheduler; the cluster's own may have coscheduling built in."""
    if wanted in ("kueue", "none", _BY_NAME.get(named)):
        return
    if named in _BY_NAME or (named == _OWN and wanted in ("kai", "volcano")):
        raise InvalidSpecError(
            f"scheduling.gang {wanted} of TorchrunQueue {queue.metadata.name}: its pods are"
            f" scheduled by {named} (scheduling.scheduler or podTemplate), which is no {wanted};"
            f" set gang to {_BY_NAME.get(named, 'native')} or none, or name another scheduler"
        )


def _check_local_queue(queue: TorchrunQueue) -> None:
    """Kueue reads the LocalQueue's name from a label."""
    asked = queue.spec.scheduling.queue_name
    name, field = (queue.metadata.name, "name") if asked is None else (asked, "queueName")
    if len(name) > names.MAX_LABEL:
        raise InvalidSpecError(
            f"scheduling.gang kueue of TorchrunQueue {queue.metadata.name}: the {field} of"
            f" {len(name)} characters does not fit into the label by which Kueue finds its"
            f" LocalQueue, which holds {names.MAX_LABEL}; set scheduling.queueName to a LocalQueue"
            " with a shorter name"
        )


def _missing(
    queue: TorchrunQueue, gang: GangScheduling, installed: Installed | None
) -> Reason | None:
    scheduler = SCHEDULERS[gang]
    if not scheduler.kinds or _served(gang, installed):
        return None
    if installed is None:
        message = (
            f"whether {gang} is installed is not known yet, as the API server does not say what it"
            " serves; see /readyz of the controller"
        )
        return Reason("GangSchedulerUnknown", message)
    resource = scheduler.kinds[0].resource
    message = (
        f"TorchrunQueue {queue.metadata.name} has its gangs scheduled by {gang}, and the API server"
        f" serves no {resource}: {scheduler.install_hint}, or set spec.scheduling.gang of the queue"
        " to none"
    )
    return Reason("GangSchedulerMissing", message)
