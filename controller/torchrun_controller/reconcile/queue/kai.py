"""The KAI queue of a TorchrunQueue: scheduling.run.ai/v2 Queue, cluster-scoped.

The oldest TorchrunQueue that names it owns it: an annotation records the owner, and the KAI queue
is deleted with it. A KAI queue without that annotation is used, but never written. KAI queues take
shares of the cluster from each other, so a setting lists the namespaces that decide on quota,
weight and parent of theirs. Sources: KAI 0.17, pkg/apis/scheduling/v2 (an unset amount is 0; a
limit of 0 allows nothing; -1 is unlimited; CPU in millicores, memory in 10^6 bytes) and its queue
webhook.
"""

from datetime import UTC, datetime
from math import ceil

from msgspec import Struct
from msgspec.structs import replace

from torchrun_api import names
from torchrun_api.json import JsonObject, JsonValue
from torchrun_api.kinds.extras import KaiQueue
from torchrun_api.kinds.meta import ConditionStatus
from torchrun_api.kinds.quantity import QuantityError, parse
from torchrun_api.kinds.queue import TorchrunQueue, TorchrunQueueSpec
from torchrun_api.kinds.resources import KAI_QUEUES
from torchrun_controller.reconcile.model.conditions import ConditionUpdate, Reason
from torchrun_controller.reconcile.model.messages import sentence
from torchrun_controller.reconcile.model.observed import Defaults
from torchrun_controller.reconcile.model.plan import Apply, Delete
from torchrun_controller.reconcile.queue.model import ObservedQueue, choose_scheduler
from torchrun_controller.reconcile.schedulers.kai import KAI, NOT_MANAGED, QUEUE_CONDITION

CONDITION = QUEUE_CONDITION
PARENTS = ("default", "default-parent-queue")
UNLIMITED = -1
MEGABYTE = 10**6
NOT_INSTALLED = "KaiNotInstalled"
SYNCED = "Synced"
NOT_A_LEAF = "NotALeaf"
NOT_ALLOWED = "NotAllowed"
WRITTEN = (SYNCED, NOT_A_LEAF, NOT_ALLOWED)  # reasons of a KAI queue that the controller wrote
_LONG_AGO = datetime.min.replace(tzinfo=UTC)


class KaiQueuePlan(Struct, frozen=True, kw_only=True):
    """The writes for the KAI queue; `condition` is None if the spec names none.

    `usable` is False if jobs would go to a KAI queue of another owner.
    """

    condition: ConditionUpdate | None = None
    apply: Apply | None = None
    deletes: tuple[Delete, ...] = ()
    usable: bool = True


def plan_kai_queue(observed: ObservedQueue, defaults: Defaults, *, idle: bool) -> KaiQueuePlan:
    """Create or update the KAI queue; once `idle`, delete one of a former name."""
    plan = _plan(observed, defaults)
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


def _plan(observed: ObservedQueue, defaults: Defaults) -> KaiQueuePlan:
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
    return _plan_named(observed, name, observed.kai, defaults)


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
    observed: ObservedQueue, name: str, kai_queues: dict[str, KaiQueue], defaults: Defaults
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
            return KaiQueuePlan(condition=_condition("True", NOT_MANAGED, message))
        if owner != identity_of(queue) and not _is_watched(observed, owner):
            return _conflict(name, owner)
    refusal = observed.refused.get((KAI_QUEUES.resource, name))
    if refusal is not None:
        condition = _condition("False", "Rejected", refusal)
        return KaiQueuePlan(condition=condition, usable=kai_queue is not None)
    is_allowed = queue.metadata.namespace in defaults.kai_quota_namespaces
    try:
        amounts = _amounts(queue.spec)
    except QuantityError as error:
        return KaiQueuePlan(
            condition=_condition("False", "InvalidSpec", f"spec.quota is invalid: {error}.")
        )
    refused_fields = () if is_allowed else _cluster_fields(queue.spec, amounts)
    if "kaiQueue" in refused_fields:
        condition = _condition("False", NOT_ALLOWED, _describe_refused(queue, refused_fields))
        return KaiQueuePlan(condition=condition)
    wanted_parent = queue.spec.parent_kai_queue
    if "parentKaiQueue" in refused_fields:
        wanted_parent = None
    parent = wanted_parent or _default_parent(kai_queue, kai_queues)
    if parent not in kai_queues:
        message = _describe_parent(wanted_parent)
        if refused_fields:
            message += f" {_describe_refused(queue, refused_fields)}"
        return KaiQueuePlan(condition=_condition("False", "ParentNotFound", message))
    resources = _resources(queue.spec, amounts, is_allowed=is_allowed)
    spec: JsonObject = {"parentQueue": parent, "resources": resources}
    up_to_date = (
        kai_queue is not None
        and owner_of(kai_queue) == identity_of(queue)
        and _contains(kai_queue.spec, spec)
    )
    uid = kai_queue.metadata.uid if kai_queue is not None else ""
    return KaiQueuePlan(
        condition=_ready_condition(observed, name, kai_queues, refused_fields),
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
    observed: ObservedQueue,
    name: str,
    kai_queues: dict[str, KaiQueue],
    refused_fields: tuple[str, ...],
) -> ConditionUpdate:
    children = sorted(child for child, q in kai_queues.items() if q.spec.get("parentQueue") == name)
    if children:
        return _condition(
            "False",
            NOT_A_LEAF,
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
    choice = choose_scheduler(observed)
    if choice is not None and choice.gang != "kai":
        note += (
            " KAI does not schedule the pods of this queue. Set scheduling.scheduler to"
            f" {KAI.api.pod_scheduler}."
        )
    if refused_fields:
        message = _describe_refused(observed.queue, refused_fields)
        return _condition("False", NOT_ALLOWED, f"{message}{note}")
    return _condition("True", SYNCED, f"KAI queue {name} is up to date.{note}")


def _cluster_fields(spec: TorchrunQueueSpec, amounts: dict[str, int]) -> tuple[str, ...]:
    """Return the fields with which a KAI queue takes shares of others: an administrator's choice.

    A queue that has the name of a default parent would become the parent of all others.
    """
    fields = {
        "kaiQueue": spec.kai_queue in PARENTS,
        "parentKaiQueue": spec.parent_kai_queue not in (None, *PARENTS),
        "quota": any(amounts.values()),
        "weight": spec.weight is not None and spec.weight > 1,
    }
    return tuple(name for name, is_set in fields.items() if is_set)


def _describe_refused(queue: TorchrunQueue, refused_fields: tuple[str, ...]) -> str:
    """Return what becomes of the fields, and which setting allows them."""
    namespace, fields = queue.metadata.namespace, ", ".join(f"spec.{f}" for f in refused_fields)
    limit = " spec.quota is a limit and no guarantee." if "quota" in refused_fields else ""
    return (
        f"Namespace {namespace} may not set {fields} of KAI queue {queue.spec.kai_queue}.{limit}"
        " An administrator can list the namespace in --kai-quota-namespaces of the controller"
        " (chart: settings.kaiQuotaNamespaces)."
    )


def _default_parent(kai_queue: KaiQueue | None, kai_queues: dict[str, KaiQueue]) -> str:
    """Return the present parent if it is a default one, else the first default that exists."""
    current_parent = str(kai_queue.spec.get("parentQueue", "")) if kai_queue is not None else ""
    default = next((parent for parent in PARENTS if parent in kai_queues), PARENTS[-1])
    keeps_parent = current_parent in PARENTS and current_parent in kai_queues
    return current_parent if keeps_parent else default


def _amounts(spec: TorchrunQueueSpec) -> dict[str, int]:
    """Return the quota in KAI's units. Raises QuantityError."""
    quota = spec.quota
    amounts: dict[str, int] = {}
    if quota is not None and quota.gpus is not None:
        amounts["gpu"] = quota.gpus
    if quota is not None and quota.cpu is not None:
        amounts["cpu"] = ceil(parse(quota.cpu) * 1000)
    if quota is not None and quota.memory is not None:
        amounts["memory"] = ceil(parse(quota.memory) / MEGABYTE)
    return amounts


def _resources(spec: TorchrunQueueSpec, amounts: dict[str, int], *, is_allowed: bool) -> JsonObject:
    """Return spec.resources of the KAI queue.

    A quota without a cohort is a limit too: such a queue borrows nothing. A resource without a
    quota is set to unlimited, since KAI takes an unset amount as 0. A queue that is not allowed to
    take from others has no guaranteed quota and a weight of at most 1: it uses what is idle.
    """
    weight = 1 if spec.weight is None else spec.weight
    if not is_allowed:
        weight = min(weight, 1)
    return {
        resource: {
            "quota": amounts.get(resource, UNLIMITED) if is_allowed else 0,
            "limit": UNLIMITED if spec.cohort else amounts.get(resource, UNLIMITED),
            "overQuotaWeight": weight,
        }
        for resource in ("gpu", "cpu", "memory")
    }


def _describe_parent(wanted_parent: str | None) -> str:
    if wanted_parent:
        return (
            f"KAI queue {wanted_parent} (spec.parentKaiQueue) does not exist. Create it or set"
            " another one."
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
    return not queue.metadata.terminating


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
