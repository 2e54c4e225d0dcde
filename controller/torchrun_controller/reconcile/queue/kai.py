"""The KAI queue of a TorchrunQueue: scheduling.run.ai/v2 Queue, cluster-scoped.

It is made and kept for the eldest TorchrunQueue that names it, which stands in its annotation, and
is removed with it. A KAI queue without that annotation is somebody else's: used, never written to.
Facts: KAI 0.17, pkg/apis/scheduling/v2 (an amount that is unset is 0; a limit of 0 allows nothing;
-1 is unlimited; CPU in millicores, memory in 10^6 bytes) and its queue webhook.
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
from torchrun_controller.reconcile.model.plan import Apply, Delete
from torchrun_controller.reconcile.queue import jobs
from torchrun_controller.reconcile.queue.model import ObservedQueue
from torchrun_controller.reconcile.schedulers.kai import KAI

CONDITION = "KaiQueueReady"
PARENTS = ("default", "default-parent-queue")
UNLIMITED = -1
MEGABYTE = 10**6
NOT_INSTALLED = "KaiNotInstalled"
KEPT = "Kept"
_LONG_AGO = datetime.min.replace(tzinfo=UTC)


class KaiQueuePlan(Struct, frozen=True, kw_only=True):
    """What is to be done about the KAI queue; no condition where the spec asks for none.

    `usable` is False where jobs would be sent to a queue that is not theirs.
    """

    condition: ConditionUpdate | None = None
    apply: Apply | None = None
    deletes: tuple[Delete, ...] = ()
    usable: bool = True


def plan_kai_queue(observed: ObservedQueue, *, idle: bool) -> KaiQueuePlan:
    """Make the KAI queue or bring it up to date; once `idle`, remove one of a former name."""
    plan = _plan(observed)
    former = _former(observed)
    refused = {queue.metadata.name: observed.refused.get(key(queue)) for queue in former}
    stuck = "; ".join(f"{name}: {why}" for name, why in refused.items() if why is not None)
    if stuck:
        message = f"the KAI queue of a former spec.kaiQueue cannot be removed: {stuck}"
        return replace(plan, condition=_condition("False", "NotRemoved", message))
    if idle:
        return replace(plan, deletes=tuple(delete(queue) for queue in former))
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
                f"the cluster has no {KAI_QUEUES.resource} in version {KAI_QUEUES.version}; it is"
                " made when KAI is installed",
            )
        )
    if observed.kai is None:
        why = observed.unseen.get(KAI_QUEUES.resource, "the cache is being filled")
        return KaiQueuePlan(
            condition=_condition("Unknown", "NotSeen", f"KAI's queues are not known: {why}")
        )
    return _plan_named(observed, name, observed.kai)


def removable(observed: ObservedQueue) -> tuple[KaiQueue, ...]:
    """KAI queues to remove with a TorchrunQueue: its own, but for one that another takes over."""
    taken = observed.queue.spec.kai_queue if observed.sharing else None
    return tuple(queue for queue in _owned(observed) if queue.metadata.name != taken)


def _former(observed: ObservedQueue) -> tuple[KaiQueue, ...]:
    name = observed.queue.spec.kai_queue
    return tuple(queue for queue in _owned(observed) if queue.metadata.name != name)


def _owned(observed: ObservedQueue) -> list[KaiQueue]:
    ours = _identity(observed.queue)
    known = observed.kai or {}
    return [known[name] for name in sorted(known) if _owner(known[name]) == ours]


def _plan_named(observed: ObservedQueue, name: str, present: dict[str, KaiQueue]) -> KaiQueuePlan:
    queue, existing = observed.queue, present.get(name)
    eldest = min((queue, *observed.sharing), key=_age)
    if eldest is not queue:
        return _younger(queue, eldest, name)
    if existing is not None:
        owner = _owner(existing)
        if not owner:
            message = (
                f"KAI queue {name} was not made for this queue: it is used as it is, and quota and"
                " weight of this queue are not handed on to it"
            )
            return KaiQueuePlan(condition=_condition("True", "NotOurs", message))
        if owner != _identity(queue) and not _is_watched(observed, owner):
            return _conflict(name, owner)
    refused = observed.refused.get((KAI_QUEUES.resource, name))
    if refused is not None:
        condition = _condition("False", "Refused", refused)
        return KaiQueuePlan(condition=condition, usable=existing is not None)
    try:
        resources = _resources(queue.spec)
    except QuantityError as error:
        return KaiQueuePlan(condition=_condition("False", "InvalidSpec", f"spec.quota: {error}"))
    parent = _parent(queue.spec, existing, present)
    if parent not in present:
        return KaiQueuePlan(
            condition=_condition("False", "ParentNotFound", _no_parent(queue, parent))
        )
    spec: JsonObject = {"parentQueue": parent, "resources": resources}
    up_to_date = (
        existing is not None
        and _owner(existing) == _identity(queue)
        and _within(existing.spec, spec)
    )
    uid = existing.metadata.uid if existing is not None else ""
    return KaiQueuePlan(
        condition=_kept(observed, name, present),
        apply=None if up_to_date else Apply(KAI_QUEUES, _body(queue, name, spec), uid),
    )


def _younger(queue: TorchrunQueue, eldest: TorchrunQueue, name: str) -> KaiQueuePlan:
    """Queues of one namespace may share a KAI queue; queues of several would share a quota."""
    if eldest.metadata.namespace != queue.metadata.namespace:
        return _conflict(name, _identity(eldest))
    message = (
        f"KAI queue {name} is kept by the older TorchrunQueue {eldest.metadata.name}, whose quota"
        " and weight it has"
    )
    return KaiQueuePlan(condition=_condition("True", "Shared", message))


def _conflict(name: str, owner: str) -> KaiQueuePlan:
    message = (
        f"KAI queue {name} belongs to the older TorchrunQueue {owner}; choose another spec.kaiQueue"
    )
    return KaiQueuePlan(condition=_condition("False", "Conflict", message), usable=False)


def _kept(observed: ObservedQueue, name: str, present: dict[str, KaiQueue]) -> ConditionUpdate:
    children = sorted(
        existing for existing, q in present.items() if q.spec.get("parentQueue") == name
    )
    if children:
        return _condition(
            "False",
            "NotALeaf",
            f"KAI queue {name} is the parent of {', '.join(children[:5])}: KAI schedules pods of"
            " queues without children only; choose another spec.kaiQueue",
        )
    quota = observed.queue.spec.quota
    none = (
        []
        if quota is None
        else [field for field in ("gpus", "cpu", "memory") if getattr(quota, field) in (0, "0")]
    )
    note = f"; of {', '.join(none)} its quota is 0: no job that asks for it runs" if none else ""
    choice = jobs.choice_of(observed)
    if choice is not None and choice.gang != "kai":
        note += (
            "; but pods of this queue are not scheduled by KAI: set scheduling.scheduler to"
            f" {KAI.pod_scheduler}"
        )
    return _condition("True", KEPT, f"KAI queue {name} is as this queue says{note}")


def _parent(
    spec: TorchrunQueueSpec, existing: KaiQueue | None, present: dict[str, KaiQueue]
) -> str:
    """The parent asked for, the one it has, or the first of the usual ones that is there."""
    has = str(existing.spec.get("parentQueue", "")) if existing is not None else ""
    usual = next((parent for parent in PARENTS if parent in present), PARENTS[-1])
    return spec.parent_kai_queue or (has if has in PARENTS and has in present else usual)


def _resources(spec: TorchrunQueueSpec) -> JsonObject:
    """spec.resources of the KAI queue. Raises QuantityError.

    A quota without a cohort is a limit as well: nothing is lent beyond it. What has no quota is not
    limited, which KAI must be message, since for it what is unset is 0.
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


def _no_parent(queue: TorchrunQueue, parent: str) -> str:
    if queue.spec.parent_kai_queue:
        return f"there is no KAI queue {parent} (spec.parentKaiQueue); make it, or name another"
    return (
        f"there is no KAI queue {' or '.join(PARENTS)} to be its parent; make one, or name one in"
        " spec.parentKaiQueue"
    )


def _body(queue: TorchrunQueue, name: str, spec: JsonObject) -> JsonObject:
    return {
        "apiVersion": KAI_QUEUES.api_version,
        "kind": KAI_QUEUES.kind,
        "metadata": {
            "name": name,
            "labels": {names.NAME_LABEL: "torchrun", names.MANAGED_BY_LABEL: names.MANAGED_BY},
            "annotations": {names.KAI_OWNER: _identity(queue)},
        },
        "spec": spec,
    }


def _within(has: JsonValue, wanted: JsonValue) -> bool:
    if isinstance(has, dict) and isinstance(wanted, dict):
        return all(_within(has.get(name), value) for name, value in wanted.items())
    return has == wanted


def _is_watched(observed: ObservedQueue, owner: str) -> bool:
    """Whether its owner would be among those that share it, if it were there and wanted it."""
    return not observed.namespaces or owner.partition("/")[0] in observed.namespaces


def _owner(queue: KaiQueue) -> str:
    return queue.metadata.annotations.get(names.KAI_OWNER, "")


def _identity(queue: TorchrunQueue) -> str:
    return f"{queue.metadata.namespace}/{queue.metadata.name}"


def _age(queue: TorchrunQueue) -> tuple[datetime, str]:
    return queue.metadata.creation_timestamp or _LONG_AGO, _identity(queue)


def delete(queue: KaiQueue) -> Delete:
    """Its deletion."""
    return Delete(kind=KAI_QUEUES, namespace="", name=queue.metadata.name, uid=queue.metadata.uid)


def key(queue: KaiQueue) -> tuple[str, str]:
    """Under which a refusal to remove it is kept."""
    return KAI_QUEUES.resource, queue.metadata.name


def _condition(status: ConditionStatus, reason: str, message: str) -> ConditionUpdate:
    return ConditionUpdate(CONDITION, status, Reason(reason, message))
