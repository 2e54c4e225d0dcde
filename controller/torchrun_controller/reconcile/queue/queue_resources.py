"""The objects of a queue's spec.resources: made, kept and removed.

ConfigMaps and PersistentVolumeClaims only, in the queue's namespace only, with the queue as their
owner. What is not the queue's is never touched: an object is made only where its name is free.
"""

import hashlib
from fractions import Fraction

import msgspec
from msgspec import Struct

from torchrun_api import names
from torchrun_api.admission import QueueResource, QueueResourceStatus
from torchrun_api.extras import ConfigMap, QueueClaim
from torchrun_api.json import JsonObject, JsonValue, object_at
from torchrun_api.kinds import CONFIG_MAPS, QUEUE_CLAIMS, TORCHRUN_QUEUES, Kind
from torchrun_api.quantity import QuantityError, parse
from torchrun_api.queue import TorchrunQueue
from torchrun_controller.reconcile.model.plan import Apply, Delete
from torchrun_controller.reconcile.queue.model import Extra, ObservedQueue

KINDS: dict[str, Kind[ConfigMap] | Kind[QueueClaim]] = {
    kind.kind: kind for kind in (CONFIG_MAPS, QUEUE_CLAIMS)
}
# Of a template's metadata; the rest is the controller's, owners and finalizers above all.
METADATA = frozenset({"labels", "annotations"})

MAKING = "it is being made"
REMAKING = "it is being deleted, and made anew after that"
# Messages of what needs nobody's hand.
PASSING = frozenset({MAKING, REMAKING})


class ResourcesPlan(Struct, frozen=True, kw_only=True):
    """What is to be done about the objects, and how each stands."""

    applies: tuple[Apply, ...] = ()
    deletes: tuple[Delete, ...] = ()
    statuses: tuple[QueueResourceStatus, ...] = ()


class _InvalidTemplateError(Exception):
    """Why a template makes no object, and what to do."""


def plan_resources(observed: ObservedQueue) -> ResourcesPlan:
    """One entry of spec.resources after the other; then what no entry asks for any more."""
    if observed.extras is None:
        why = "; ".join(observed.unseen.values()) or "the cache is being filled"
        entries = observed.queue.spec.resources
        return ResourcesPlan(
            statuses=tuple(_not_ready(e, "", f"not looked at: {why}") for e in entries)
        )
    present = {(_kind(extra).kind, extra.metadata.name): extra for extra in observed.extras}
    kept: set[tuple[str, str]] = set()
    applies: list[Apply] = []
    statuses: list[QueueResourceStatus] = []
    for entry in observed.queue.spec.resources:
        name = object_name(observed.queue, entry)
        try:
            kind = _kind_of(entry)
            if (kind.kind, name) in kept:
                raise _InvalidTemplateError(
                    f"{kind.kind} {name} is another entry's: choose another name"
                )
        except _InvalidTemplateError as error:
            # What a better template has made stays until the entry goes.
            kept |= {(kind, name) for kind in KINDS}
            statuses.append(_not_ready(entry, "", str(error)))
            continue
        kept.add((kind.kind, name))
        intent, status = _one(observed, entry, kind, present.get((kind.kind, name)))
        if intent is not None:
            applies.append(intent)
        statuses.append(status)
    unwanted = [extra for key, extra in present.items() if key not in kept and not _going(extra)]
    return ResourcesPlan(
        applies=tuple(applies),
        deletes=tuple(_delete(e) for e in unwanted if _key(e) not in observed.refused),
        statuses=tuple(sorted(statuses, key=lambda status: status.name)),
    )


def object_name(queue: TorchrunQueue, entry: QueueResource) -> str:
    """The name of an entry's object."""
    return entry.name if entry.name_mode == "Exact" else f"{queue.metadata.name}-{entry.name}"


def _kind_of(entry: QueueResource) -> Kind[ConfigMap] | Kind[QueueClaim]:
    template = entry.template
    version, name = template.get("apiVersion"), template.get("kind")
    kind = KINDS.get(str(name)) if version == "v1" else None
    if kind is None:
        raise _InvalidTemplateError(
            f"template: {version} {name} is not made here; only v1 ConfigMap and v1"
            " PersistentVolumeClaim are"
        )
    further = sorted(object_at(template, "metadata").keys() - METADATA)
    if further:
        raise _InvalidTemplateError(
            f"template.metadata.{further[0]}: remove it; only labels and annotations may be given"
        )
    return kind


def _one(
    observed: ObservedQueue,
    entry: QueueResource,
    kind: Kind[ConfigMap] | Kind[QueueClaim],
    present: Extra | None,
) -> tuple[Apply | None, QueueResourceStatus]:
    name = object_name(observed.queue, entry)
    object_ref = f"{kind.kind}/{name}"
    refused = observed.refused.get((kind.resource, name))
    if refused is not None:
        return None, _not_ready(entry, object_ref, refused)
    body = _body(observed.queue, entry, name)
    if present is None:
        return Apply(kind, body), _not_ready(entry, object_ref, MAKING)
    if _going(present):
        return None, _not_ready(entry, object_ref, REMAKING)
    if entry.immutable:
        return None, QueueResourceStatus(name=entry.name, object=object_ref, ready=True)
    lasting = larger = ""
    if isinstance(present, QueueClaim):
        try:
            body, lasting, larger = _update_claim(present, body)
        except QuantityError as error:
            return None, _not_ready(entry, object_ref, f"template.spec.resources: {error}")
    drifted = _digest(present) != _digest_in(body) or not _contains(present.content, _content(body))
    status = QueueResourceStatus(
        name=entry.name, object=object_ref, ready=not lasting, message=lasting or larger
    )
    return Apply(kind, body, present.metadata.uid) if drifted else None, status


def _body(queue: TorchrunQueue, entry: QueueResource, name: str) -> JsonObject:
    """The object that the template asks for."""
    asked = object_at(entry.template, "metadata")
    digest = hashlib.sha256(msgspec.json.encode(entry.template, order="sorted")).hexdigest()
    return {
        **entry.template,
        "metadata": {
            "name": name,
            "namespace": queue.metadata.namespace,
            "labels": {
                **object_at(asked, "labels"),
                names.QUEUE_LABEL: names.label_value(queue.metadata.name),
                names.NAME_LABEL: "torchrun",
                names.COMPONENT_LABEL: names.QUEUE_RESOURCE,
                names.MANAGED_BY_LABEL: names.MANAGED_BY,
            },
            "annotations": {**object_at(asked, "annotations"), names.TEMPLATE: digest},
            "ownerReferences": [
                {
                    "apiVersion": TORCHRUN_QUEUES.api_version,
                    "kind": TORCHRUN_QUEUES.kind,
                    "name": queue.metadata.name,
                    "uid": queue.metadata.uid,
                    "controller": True,
                }
            ],
        },
    }


def _update_claim(present: QueueClaim, body: JsonObject) -> tuple[JsonObject, str, str]:
    """The body with what a claim lets change, what it does not, and a remark on its size.

    A claim's spec is fixed but for its size, which may only grow.
    """
    asked, has = object_at(body, "spec"), present.spec
    fixed = [name for name in asked if name != "resources" and name in has]
    differing = [name for name in asked if name != "resources" and not _same(name, asked, has)]
    wanted, held = _size(asked), _size(has)
    size = wanted if _amount(wanted) > _amount(held) else held
    spec: JsonObject = {name: has[name] for name in fixed}
    if size is not None:
        spec["resources"] = {"requests": {"storage": size}}
    lasting = "; ".join(f"spec.{name} of a claim cannot be changed" for name in sorted(differing))
    advice = "; delete the claim and its data, or choose another name" if lasting else ""
    shrinks = _amount(wanted) < _amount(held)
    larger = f"it is larger, and a claim cannot shrink from {held} to {wanted}" if shrinks else ""
    return {**body, "spec": spec}, lasting + advice, larger


def _same(name: str, asked: JsonObject, has: JsonObject) -> bool:
    return name in has and _contains(has[name], asked[name])


def _size(spec: JsonObject) -> JsonValue:
    return object_at(object_at(spec, "resources"), "requests").get("storage")


def _amount(size: JsonValue) -> Fraction:
    """Bytes, 0 where nothing is said. Raises QuantityError for what is no quantity."""
    if size is None:
        return Fraction(0)
    return parse(size if isinstance(size, int | str) else str(size))


def _content(body: JsonObject) -> JsonObject:
    """What is to be found in the object: sizes apart, which the API server writes its own way."""
    content: JsonObject = {n: body[n] for n in ("data", "binaryData") if n in body}
    if "spec" in body:
        spec = object_at(body, "spec")
        content["spec"] = {name: value for name, value in spec.items() if name != "resources"}
    return content


def _contains(has: JsonValue, wanted: JsonValue) -> bool:
    """Whether all that is wanted is there; what others have added is theirs."""
    if isinstance(has, dict) and isinstance(wanted, dict):
        return all(name in has and _contains(has[name], wanted[name]) for name in wanted)
    return has == wanted


def _digest(extra: Extra) -> str:
    return extra.metadata.annotations.get(names.TEMPLATE, "")


def _digest_in(body: JsonObject) -> JsonValue:
    return object_at(object_at(body, "metadata"), "annotations")[names.TEMPLATE]


def _kind(extra: Extra) -> Kind[ConfigMap] | Kind[QueueClaim]:
    return CONFIG_MAPS if isinstance(extra, ConfigMap) else QUEUE_CLAIMS


def _key(extra: Extra) -> tuple[str, str]:
    return _kind(extra).resource, extra.metadata.name


def _going(extra: Extra) -> bool:
    return extra.metadata.deletion_timestamp is not None


def _delete(extra: Extra) -> Delete:
    meta = extra.metadata
    return Delete(kind=_kind(extra), namespace=meta.namespace, name=meta.name, uid=meta.uid)


def _not_ready(entry: QueueResource, object_ref: str, message: str) -> QueueResourceStatus:
    return QueueResourceStatus(
        name=entry.name, object=object_ref, ready=False, message=message[:1024]
    )
