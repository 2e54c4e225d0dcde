"""Input and output of the reconcile of one queue, as frozen values."""

from typing import Literal

from msgspec import Struct

from torchrun_api.extras import KaiQueue
from torchrun_api.job import TorchrunJob
from torchrun_api.queue import TorchrunQueue, TorchrunQueueStatus
from torchrun_controller.reconcile.model.installed import Installed
from torchrun_controller.reconcile.model.plan import Apply, Delete, Event

NOT_SYNCED = "the cache is not synced yet"


class TemplateCheck(Struct, frozen=True):
    """The API server's answer to the dry run of a Job from the template of this generation.

    `accepted` is "Unknown" if the controller lacks the permission to try.
    """

    generation: int
    accepted: Literal["True", "False", "Unknown"]
    message: str = ""


class ObservedQueue(Struct, frozen=True, kw_only=True):
    """The present state of one queue.

    `jobs` are those of the queue. `kai` are all KAI queues by name; None while unknown, for the
    reason `kai_problem`. `kai_users` are the other TorchrunQueues that name a KAI queue, deleted
    ones included. `refused` has the message of each refused write, by resource and name.
    `namespace` is the watched one, "" for all.
    """

    queue: TorchrunQueue
    jobs: tuple[TorchrunJob, ...] = ()
    installed: Installed | None = None
    kai: dict[str, KaiQueue] | None = None
    kai_problem: str = NOT_SYNCED
    kai_users: tuple[TorchrunQueue, ...] = ()
    refused: dict[tuple[str, str], str] = {}
    template_check: TemplateCheck | None = None
    namespace: str = ""


class QueuePlan(Struct, frozen=True, kw_only=True):
    """The writes, in this order: applies, deletes, status, events.

    A `trial` comes alone: the controller sends it as a dry run, and calls reconcile again with the
    TemplateCheck. `status` is None if the present one is up to date.
    """

    trial: Apply | None = None
    applies: tuple[Apply, ...] = ()
    deletes: tuple[Delete, ...] = ()
    status: TorchrunQueueStatus | None = None
    events: tuple[Event, ...] = ()
