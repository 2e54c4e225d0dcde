"""What reconcile may look at for one queue, as one frozen value, and what it decides."""

from typing import Literal, TypeAlias

from msgspec import Struct

from torchrun_api.extras import ConfigMap, KaiQueue, QueueClaim
from torchrun_api.job import TorchrunJob
from torchrun_api.queue import TorchrunQueue, TorchrunQueueStatus
from torchrun_controller.reconcile.model.installed import Installed
from torchrun_controller.reconcile.model.plan import Apply, Delete, Event

Extra: TypeAlias = ConfigMap | QueueClaim


class TemplateCheck(Struct, frozen=True):
    """The API server's answer to a dry run of a Job made from the template of this generation.

    `accepted` is "Unknown" where the controller may not ask.
    """

    generation: int
    accepted: Literal["True", "False", "Unknown"]
    message: str = ""


class ObservedQueue(Struct, frozen=True, kw_only=True):
    """The present state of one queue.

    `jobs` name it. `extras` are ConfigMaps and claims that its UID controls, None while they are
    not known; `kai` are all KAI queues by name, None while they are not known; `unseen` says of a
    resource why that is so. `sharing` are the other TorchrunQueues that name the same KAI queue.
    `refused` holds, by resource and name, what the last writes were answered. `namespaces` are
    those that are watched; () for all.
    """

    queue: TorchrunQueue
    jobs: tuple[TorchrunJob, ...] = ()
    extras: tuple[Extra, ...] | None = ()
    installed: Installed | None = None
    kai: dict[str, KaiQueue] | None = None
    unseen: dict[str, str] = {}
    sharing: tuple[TorchrunQueue, ...] = ()
    refused: dict[tuple[str, str], str] = {}
    template_check: TemplateCheck | None = None
    namespaces: tuple[str, ...] = ()


class QueuePlan(Struct, frozen=True, kw_only=True):
    """Carried out in this order: applies, deletes, status, events.

    A `trial` is asked for before anything else: reconcile wants to be called again with the API
    server's TemplateCheck on it. `status` is None where the present one says it all.
    """

    trial: Apply | None = None
    applies: tuple[Apply, ...] = ()
    deletes: tuple[Delete, ...] = ()
    status: TorchrunQueueStatus | None = None
    events: tuple[Event, ...] = ()
