"""The objects of a queue's spec.resources: created, updated and deleted.

Only ConfigMaps and PersistentVolumeClaims, only in the namespace of the queue, with the queue as
their owner. Objects of other owners are never written: an object is created only if its name is
free.
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
# The metadata that a template may set; the controller sets owners, finalizers and all else.
METADATA = frozenset({"labels", "annotations"})

MAKING = "Creating the object."
REMAKING = "The object is being deleted. A new one is created when it is gone."
# Messages of states that pass without an action of the user.
PASSING = frozenset({MAKING, REMAKING})


class ResourcesPlan(Struct, frozen=True, kw_only=True):
    """The writes for the objects, and the status of each."""

    applies: tuple[Apply, ...] = ()
    deletes: tuple[Delete, ...] = ()
    statuses: tuple[QueueResourceStatus, ...] = ()


class _InvalidTemplateError(Exception):
    """Why no object can be created from a template, and what to do."""


def plan_resources(observed: ObservedQueue) -> ResourcesPlan:
    """Plan each entry of spec.resources; then delete the objects that have no entry any more."""
    if observed.extras is None:
        why = "; ".join(observed.unseen.values()) or "the cache is not synced yet"
        entries = observed.queue.spec.resources
        return ResourcesPlan(
            statuses=tuple(
                _not_ready(e, "", f"The objects cannot be read: {why}.") for e in entries
            )
        )
    extras_by_key = {(_kind(extra).kind, extra.metadata.name): extra for extra in observed.extras}
    keys: set[tuple[str, str]] = set()
    applies: list[Apply] = []
    statuses: list[QueueResourceStatus] = []
    for entry in observed.queue.spec.resources:
        name = object_name(observed.queue, entry)
        try:
            kind = _kind_of(entry)
            if (kind.kind, name) in keys:
                raise _InvalidTemplateError(
                    f"{kind.kind} {name} belongs to another entry of spec.resources. Choose"
                    " another name."
                )
        except _InvalidTemplateError as error:
            # The object of an earlier, valid template stays as long as the entry.
            keys |= {(kind, name) for kind in KINDS}
            statuses.append(_not_ready(entry, "", str(error)))
            continue
        keys.add((kind.kind, name))
        apply, status = _plan_object(observed, entry, kind, extras_by_key.get((kind.kind, name)))
        if apply is not None:
            applies.append(apply)
        statuses.append(status)
    stale_extras = [
        extra
        for key, extra in extras_by_key.items()
        if key not in keys and not _is_terminating(extra)
    ]
    return ResourcesPlan(
        applies=tuple(applies),
        deletes=tuple(_delete(e) for e in stale_extras if _key(e) not in observed.refused),
        statuses=_one_of_each_name(statuses),
    )


def _one_of_each_name(statuses: list[QueueResourceStatus]) -> tuple[QueueResourceStatus, ...]:
    """Return the statuses by name. Of two, which the status cannot have, one that is not ready.

    The schema of a queue does not permit two entries of one name.
    """
    by_name = {status.name: status for status in sorted(statuses, key=lambda s: not s.ready)}
    return tuple(by_name[name] for name in sorted(by_name))


def object_name(queue: TorchrunQueue, entry: QueueResource) -> str:
    """Return the name of an entry's object."""
    return entry.name if entry.name_mode == "Exact" else f"{queue.metadata.name}-{entry.name}"


def _kind_of(entry: QueueResource) -> Kind[ConfigMap] | Kind[QueueClaim]:
    template = entry.template
    version, name = template.get("apiVersion"), template.get("kind")
    kind = KINDS.get(str(name)) if version == "v1" else None
    if kind is None:
        raise _InvalidTemplateError(
            f"template is {version} {name}, but only v1 ConfigMap and v1 PersistentVolumeClaim are"
            " supported."
        )
    unsupported = sorted(object_at(template, "metadata").keys() - METADATA)
    if unsupported:
        raise _InvalidTemplateError(
            f"template.metadata.{unsupported[0]} is not supported. Remove it: only labels and"
            " annotations can be set."
        )
    return kind


def _plan_object(
    observed: ObservedQueue,
    entry: QueueResource,
    kind: Kind[ConfigMap] | Kind[QueueClaim],
    extra: Extra | None,
) -> tuple[Apply | None, QueueResourceStatus]:
    name = object_name(observed.queue, entry)
    object_ref = f"{kind.kind}/{name}"
    rejection = observed.refused.get((kind.resource, name))
    if rejection is not None:
        return None, _not_ready(entry, object_ref, rejection)
    body = _body(observed.queue, entry, name)
    if extra is None:
        return Apply(kind, body), _not_ready(entry, object_ref, MAKING)
    if _is_terminating(extra):
        return None, _not_ready(entry, object_ref, REMAKING)
    if entry.immutable:
        return None, QueueResourceStatus(name=entry.name, object=object_ref, ready=True)
    refusal = remark = ""
    if isinstance(extra, QueueClaim):
        try:
            body, refusal, remark = _update_claim(extra, body)
        except QuantityError as error:
            return None, _not_ready(
                entry, object_ref, f"template.spec.resources is invalid: {error}."
            )
    is_outdated = _digest(extra) != _digest_in(body) or not _contains(extra.content, _content(body))
    status = QueueResourceStatus(
        name=entry.name, object=object_ref, ready=not refusal, message=refusal or remark
    )
    return Apply(kind, body, extra.metadata.uid) if is_outdated else None, status


def _body(queue: TorchrunQueue, entry: QueueResource, name: str) -> JsonObject:
    """Return the object of the template."""
    meta = object_at(entry.template, "metadata")
    digest = hashlib.sha256(msgspec.json.encode(entry.template, order="sorted")).hexdigest()
    return {
        **entry.template,
        "metadata": {
            "name": name,
            "namespace": queue.metadata.namespace,
            "labels": {
                **object_at(meta, "labels"),
                names.QUEUE_LABEL: names.label_value(queue.metadata.name),
                names.NAME_LABEL: "torchrun",
                names.COMPONENT_LABEL: names.QUEUE_RESOURCE,
                names.MANAGED_BY_LABEL: names.MANAGED_BY,
            },
            "annotations": {**object_at(meta, "annotations"), names.TEMPLATE: digest},
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


def _update_claim(claim: QueueClaim, body: JsonObject) -> tuple[JsonObject, str, str]:
    """Return the body as it may be applied, the refused changes, and a remark on the size.

    The spec of a PVC is immutable except for its size, which may only grow.
    """
    new_spec, old_spec = object_at(body, "spec"), claim.spec
    fixed_fields = [name for name in new_spec if name != "resources" and name in old_spec]
    changed_fields = [
        name for name in new_spec if name != "resources" and not _is_equal(name, new_spec, old_spec)
    ]
    new_size, old_size = _size(new_spec), _size(old_spec)
    size = new_size if _amount(new_size) > _amount(old_size) else old_size
    spec: JsonObject = {name: old_spec[name] for name in fixed_fields}
    if size is not None:
        spec["resources"] = {"requests": {"storage": size}}
    refusal = " ".join(f"spec.{name} of a PVC is immutable." for name in sorted(changed_fields))
    advice = " Delete the PVC and its data, or choose another name." if refusal else ""
    remark = ""
    if _amount(new_size) < _amount(old_size):
        remark = f"The PVC has {old_size}; a PVC cannot shrink to {new_size}."
    return {**body, "spec": spec}, refusal + advice, remark


def _is_equal(name: str, new_spec: JsonObject, old_spec: JsonObject) -> bool:
    return name in old_spec and _contains(old_spec[name], new_spec[name])


def _size(spec: JsonObject) -> JsonValue:
    return object_at(object_at(spec, "resources"), "requests").get("storage")


def _amount(size: JsonValue) -> Fraction:
    """Return bytes, 0 for no size. Raises QuantityError for an invalid quantity."""
    if size is None:
        return Fraction(0)
    return parse(size if isinstance(size, int | str) else str(size))


def _content(body: JsonObject) -> JsonObject:
    """Return the fields to compare: no sizes, which the API server normalises."""
    content: JsonObject = {n: body[n] for n in ("data", "binaryData") if n in body}
    if "spec" in body:
        spec = object_at(body, "spec")
        content["spec"] = {name: value for name, value in spec.items() if name != "resources"}
    return content


def _contains(actual: JsonValue, target: JsonValue) -> bool:
    """Whether all target fields are present; fields of other managers are ignored."""
    if isinstance(actual, dict) and isinstance(target, dict):
        return all(name in actual and _contains(actual[name], target[name]) for name in target)
    return actual == target


def _digest(extra: Extra) -> str:
    return extra.metadata.annotations.get(names.TEMPLATE, "")


def _digest_in(body: JsonObject) -> JsonValue:
    return object_at(object_at(body, "metadata"), "annotations")[names.TEMPLATE]


def _kind(extra: Extra) -> Kind[ConfigMap] | Kind[QueueClaim]:
    return CONFIG_MAPS if isinstance(extra, ConfigMap) else QUEUE_CLAIMS


def _key(extra: Extra) -> tuple[str, str]:
    return _kind(extra).resource, extra.metadata.name


def _is_terminating(extra: Extra) -> bool:
    return extra.metadata.deletion_timestamp is not None


def _delete(extra: Extra) -> Delete:
    return Delete.of(_kind(extra), extra.metadata)


def _not_ready(entry: QueueResource, object_ref: str, message: str) -> QueueResourceStatus:
    return QueueResourceStatus(
        name=entry.name, object=object_ref, ready=False, message=message[:1024]
    )
