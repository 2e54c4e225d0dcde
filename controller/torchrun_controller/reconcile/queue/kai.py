"""The KAI queue of a TorchrunQueue: scheduling.run.ai/v2 Queue, cluster-scoped.

The oldest TorchrunQueue that names it owns it: an annotation records the owner, and the KAI queue
is deleted with it. A KAI queue without that annotation is used, but never written. Sources:
KAI 0.17, pkg/apis/scheduling/v2 (an unset amount is 0; a limit of 0 allows nothing; -1 is
unlimited; CPU in millicores, memory in 10^6 bytes) and its queue webhook.
"""

from datetime import UTC, datetime
from math import ceil

from msgspec import Struct
from msgspec.structs import replace

from torchrun_api import names
from torchrun_api.extras import KaiQueue
from torchrun_api.json import JsonObject, JsonValue
from torchrun_api.kinds import KAI_QUEUES
from torchrun_api.meta import ConditionStatus
from torchrun_api.quantity import QuantityError, parse
from torchrun_api.queue import TorchrunQueue, TorchrunQueueSpec
from torchrun_controller.reconcile.model.conditions import ConditionUpdate, Reason
from torchrun_controller.reconcile.model.messages import sentence
from torchrun_controller.reconcile.model.plan import Apply, Delete
from torchrun_controller.reconcile.queue import jobs
from torchrun_controller.reconcile.queue.model import ObservedQueue
from torchrun_controller.reconcile.schedulers.kai import KAI

CONDITION = "KaiQueueReady"
PARENTS = ("default", "default-parent-queue")
UNLIMITED = -1
MEGABYTE = 10**6
NOT_INSTALLED = "KaiNotInstalled"
SYNCED = "Synced"
_LONG_AGO = datetime.min.replace(tzinfo=UTC)


class KaiQueuePlan(Struct, frozen=True, kw_only=True):
    """The writes for the KAI queue; `condition` is None if the spec names none.

    `usable` is False if jobs would go to a KAI queue of another owner.
    """

    condition: ConditionUpdate | None = None
    apply: Apply | None = None
    deletes: tuple[Delete, ...] = ()
    usable: bool = True


def plan_kai_queue(observed: ObservedQueue, *, idle: bool) -> KaiQueuePlan:
    """Create or update the KAI queue; once `idle`, delete one of a former name."""
    plan = _plan(observed)
    former_queues = _former(observed)
    refusals = {queue.metadata.name: observed.refused.get(key(queue)) for queue in former_queues}
    problems = "; ".join(f"{name}: {why}" for name, why in refusals.items() if why is not None)
    if problems:
        message = sentence(
            f"The KAI queue of the previous spec.kaiQueue cannot be removed: {problems}"
        )
        return replace(plan, condition=_condition("False", "NotRemoved", message))
    if idle:
        return replace(plan, deletes=tuple(delete(queue) for queue in former_queues))
    return plan


def _plan(observed: ObservedQueue) -> KaiQueuePlan:
    name = observed.queue.spec.kai_queue
    if name is None:
        return KaiQueuePlan()
    if observed.installed is not None and not observed.installed.serves(KAI_QUEUES):
        return KaiQueuePlan(
            condition=_condition(
                "False",
                NOT_INSTALLED,
                f"The cluster does not serve {KAI_QUEUES.resource} in version"
                f" {KAI_QUEUES.version}. The KAI queue is created when KAI is installed.",
            )
        )
    if observed.kai is None:
        return KaiQueuePlan(
            condition=_condition(
                "Unknown",
                "NotChecked",
                sentence(f"KAI queues cannot be read: {observed.kai_problem}"),
            )
        )
    return _plan_named(observed, name, observed.kai)


def find_removable(observed: ObservedQueue) -> tuple[KaiQueue, ...]:
    """Return the KAI queues to delete with a TorchrunQueue: its own that no live one names.

    Two deleted queues do not wait for each other.
    """
    users = filter(_is_live, observed.kai_users)
    names_in_use = {user.spec.kai_queue for user in users}
    return tuple(queue for queue in _owned(observed) if queue.metadata.name not in names_in_use)


def _former(observed: ObservedQueue) -> tuple[KaiQueue, ...]:
    """Return the KAI queues of former names. Jobs of a deleted queue may still use one, too."""
    users = (observed.queue, *observed.kai_users)
    names_in_use = {user.spec.kai_queue for user in users}
    return tuple(queue for queue in _owned(observed) if queue.metadata.name not in names_in_use)


def _owned(observed: ObservedQueue) -> list[KaiQueue]:
    identity = identity_of(observed.queue)
    by_name = observed.kai or {}
    return [by_name[name] for name in sorted(by_name) if owner_of(by_name[name]) == identity]


def _plan_named(
    observed: ObservedQueue, name: str, kai_queues: dict[str, KaiQueue]
) -> KaiQueuePlan:
    queue, kai_queue = observed.queue, kai_queues.get(name)
    sharing = (user for user in observed.kai_users if user.spec.kai_queue == name)
    oldest = min((queue, *filter(_is_live, sharing)), key=_age)
    if oldest is not queue:
        return _plan_younger(queue, oldest, name)
    if kai_queue is not None:
        owner = owner_of(kai_queue)
        if not owner:
            message = (
                f"KAI queue {name} is not managed by this controller. It is used unchanged; the"
                " quota and weight of this TorchrunQueue do not apply to it."
            )
            return KaiQueuePlan(condition=_condition("True", "NotManaged", message))
        if owner != identity_of(queue) and not _is_watched(observed, owner):
            return _conflict(name, owner)
    refusal = observed.refused.get((KAI_QUEUES.resource, name))
    if refusal is not None:
        condition = _condition("False", "Rejected", refusal)
        return KaiQueuePlan(condition=condition, usable=kai_queue is not None)
    try:
        resources = _resources(queue.spec)
    except QuantityError as error:
        return KaiQueuePlan(
            condition=_condition("False", "InvalidSpec", f"spec.quota is invalid: {error}.")
        )
    parent = _parent(queue.spec, kai_queue, kai_queues)
    if parent not in kai_queues:
        return KaiQueuePlan(
            condition=_condition("False", "ParentNotFound", _describe_parent(queue, parent))
        )
    spec: JsonObject = {"parentQueue": parent, "resources": resources}
    up_to_date = (
        kai_queue is not None
        and owner_of(kai_queue) == identity_of(queue)
        and _contains(kai_queue.spec, spec)
    )
    uid = kai_queue.metadata.uid if kai_queue is not None else ""
    return KaiQueuePlan(
        condition=_ready_condition(observed, name, kai_queues),
        apply=None if up_to_date else Apply(KAI_QUEUES, _body(queue, name, spec), uid),
    )


def _plan_younger(queue: TorchrunQueue, oldest: TorchrunQueue, name: str) -> KaiQueuePlan:
    """Share the KAI queue within a namespace only: across namespaces a quota would be shared."""
    if oldest.metadata.namespace != queue.metadata.namespace:
        return _conflict(name, identity_of(oldest))
    message = (
        f"KAI queue {name} is managed by the older TorchrunQueue {oldest.metadata.name} and has"
        " its quota and weight."
    )
    return KaiQueuePlan(condition=_condition("True", "Shared", message))


def _conflict(name: str, owner: str) -> KaiQueuePlan:
    message = (
        f"KAI queue {name} belongs to the older TorchrunQueue {owner}. Choose another"
        " spec.kaiQueue."
    )
    return KaiQueuePlan(condition=_condition("False", "Conflict", message), usable=False)


def _ready_condition(
    observed: ObservedQueue, name: str, kai_queues: dict[str, KaiQueue]
) -> ConditionUpdate:
    children = sorted(child for child, q in kai_queues.items() if q.spec.get("parentQueue") == name)
    if children:
        return _condition(
            "False",
            "NotALeaf",
            f"KAI queue {name} is the parent of {', '.join(children[:5])}. KAI schedules pods only"
            " in queues without children. Choose another spec.kaiQueue.",
        )
    quota = observed.queue.spec.quota
    zeros = (
        []
        if quota is None
        else [field for field in ("gpus", "cpu", "memory") if getattr(quota, field) in (0, "0")]
    )
    note = f" Its quota for {', '.join(zeros)} is 0: no job that requests it runs." if zeros else ""
    choice = jobs.choose_scheduler(observed)
    if choice is not None and choice.gang != "kai":
        note += (
            " KAI does not schedule the pods of this queue. Set scheduling.scheduler to"
            f" {KAI.api.pod_scheduler}."
        )
    return _condition("True", SYNCED, f"KAI queue {name} is up to date.{note}")


def _parent(
    spec: TorchrunQueueSpec, kai_queue: KaiQueue | None, kai_queues: dict[str, KaiQueue]
) -> str:
    """Return the parent of the spec, else the present one, else the first default that exists."""
    current_parent = str(kai_queue.spec.get("parentQueue", "")) if kai_queue is not None else ""
    default = next((parent for parent in PARENTS if parent in kai_queues), PARENTS[-1])
    keeps_parent = current_parent in PARENTS and current_parent in kai_queues
    return spec.parent_kai_queue or (current_parent if keeps_parent else default)


def _resources(spec: TorchrunQueueSpec) -> JsonObject:
    """Return spec.resources of the KAI queue. Raises QuantityError.

    A quota without a cohort is a limit too: such a queue borrows nothing. A resource without a
    quota is set to unlimited, since KAI takes an unset amount as 0.
    """
    quota = spec.quota
    amounts: dict[str, int] = {}
    if quota is not None and quota.gpus is not None:
        amounts["gpu"] = quota.gpus
    if quota is not None and quota.cpu is not None:
        amounts["cpu"] = ceil(parse(quota.cpu) * 1000)
    if quota is not None and quota.memory is not None:
        amounts["memory"] = ceil(parse(quota.memory) / MEGABYTE)
    weight = 1 if spec.weight is None else spec.weight
    return {
        resource: {
            "quota": amounts.get(resource, UNLIMITED),
            "limit": UNLIMITED if spec.cohort else amounts.get(resource, UNLIMITED),
            "overQuotaWeight": weight,
        }
        for resource in ("gpu", "cpu", "memory")
    }


def _describe_parent(queue: TorchrunQueue, parent: str) -> str:
    if queue.spec.parent_kai_queue:
        return (
            f"KAI queue {parent} (spec.parentKaiQueue) does not exist. Create it or set another"
            " one."
        )
    return (
        f"No parent KAI queue exists ({' or '.join(PARENTS)}). Create one or set"
        " spec.parentKaiQueue."
    )


def _body(queue: TorchrunQueue, name: str, spec: JsonObject) -> JsonObject:
    return {
        "apiVersion": KAI_QUEUES.api_version,
        "kind": KAI_QUEUES.kind,
        "metadata": {
            "name": name,
            "labels": {names.NAME_LABEL: "torchrun", names.MANAGED_BY_LABEL: names.MANAGED_BY},
            "annotations": {names.KAI_OWNER: identity_of(queue)},
        },
        "spec": spec,
    }


def _contains(actual: JsonValue, target: JsonValue) -> bool:
    if isinstance(actual, dict) and isinstance(target, dict):
        return all(_contains(actual.get(name), value) for name, value in target.items())
    return actual == target


def _is_watched(observed: ObservedQueue, owner: str) -> bool:
    """Whether the controller watches the namespace of the owner, and so would see it."""
    return observed.namespace in ("", owner.partition("/")[0])


def _is_live(queue: TorchrunQueue) -> bool:
    return queue.metadata.deletion_timestamp is None


def _age(queue: TorchrunQueue) -> tuple[datetime, str]:
    return queue.metadata.creation_timestamp or _LONG_AGO, identity_of(queue)


def delete(queue: KaiQueue) -> Delete:
    """Return the deletion of a KAI queue, unless another TorchrunQueue takes it over meanwhile."""
    meta = queue.metadata
    return Delete.of(KAI_QUEUES, meta, resource_version=meta.resource_version)


def owner_of(queue: KaiQueue) -> str:
    """Return the identity of the TorchrunQueue that owns a KAI queue; "" for one of users."""
    return queue.metadata.annotations.get(names.KAI_OWNER, "")


def identity_of(queue: TorchrunQueue) -> str:
    """Return the value of the annotation of its KAI queue."""
    return f"{queue.metadata.namespace}/{queue.metadata.name}"


def key(queue: KaiQueue) -> tuple[str, str]:
    """Return the key of its refused deletion in ObservedQueue.refused."""
    return KAI_QUEUES.resource, queue.metadata.name


def _condition(status: ConditionStatus, reason: str, message: str) -> ConditionUpdate:
    return ConditionUpdate(CONDITION, status, Reason(reason, message))
