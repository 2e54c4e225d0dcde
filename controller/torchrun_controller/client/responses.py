"""The fields that are read from responses to writes, and whose object has a taken name."""

from datetime import datetime
from typing import Any

import msgspec
from msgspec import field

from torchrun_api.json import JsonObject
from torchrun_api.kinds.meta import ChildMeta, OwnerReference, Wire, find_controller
from torchrun_api.kinds.resources import Kind
from torchrun_api.names import RETAINED_LABEL
from torchrun_controller.reconcile.model.observed import Conflict


class Meta(Wire, frozen=True, kw_only=True):
    """Identity and version of an object. All empty in a Status, as after some deletes."""

    uid: str = ""
    resource_version: str = ""
    deletion_timestamp: datetime | None = None
    owner_references: tuple[OwnerReference, ...] = ()


class _Manager(Wire, frozen=True, kw_only=True):
    manager: str = ""


class HolderMeta(Meta, frozen=True, kw_only=True):
    """The metadata of the object that has a taken name, with the fields that show its owner."""

    labels: dict[str, str] = field(default_factory=dict)
    managed_fields: tuple[_Manager, ...] = ()

    @property
    def managers(self) -> list[str]:
        """The field managers of the object, sorted."""
        return sorted({entry.manager for entry in self.managed_fields} - {""})


class _Object(Wire, frozen=True, kw_only=True):
    metadata: Meta = Meta()


class _Holder(Wire, frozen=True, kw_only=True):
    metadata: HolderMeta


class _Child(Wire, frozen=True, kw_only=True):
    metadata: ChildMeta


class _Children(Wire, frozen=True, kw_only=True):
    items: tuple[_Child, ...] | None  # null in an empty list of metadata (observed with 1.35)


_decode_children = msgspec.json.Decoder(_Children).decode
_decode_object = msgspec.json.Decoder(_Object).decode
_decode_holder = msgspec.json.Decoder(_Holder).decode


def read_deleted(body: bytes) -> Meta:
    """Read the response to a delete: the object being deleted, or a Status. Raises ValueError."""
    meta = _decode_object(body).metadata
    if meta.resource_version:
        int(meta.resource_version)
    return meta


def read_object(body: bytes) -> Meta:
    """Read an object from the response to a GET or a write. Raises ValueError."""
    return _validate_identity(_decode_object(body).metadata)


def read_children(body: bytes) -> tuple[ChildMeta, ...]:
    """Read the metadata of the objects in a list. Raises ValueError."""
    return tuple(child.metadata for child in _decode_children(body).items or ())


def read_holder(body: bytes) -> HolderMeta:
    """Read the object that has a taken name. Raises ValueError."""
    meta = _decode_holder(body).metadata
    _validate_identity(meta)
    return meta


def _validate_identity(meta: Meta) -> Meta:
    if not meta.uid:
        raise ValueError("an object without metadata.uid")
    int(meta.resource_version)
    return meta


def read_controller(references: object) -> OwnerReference | None:
    """Return the controller among the ownerReferences of a body; None without one."""
    return find_controller(msgspec.convert(references or (), tuple[OwnerReference, ...]))


def is_ours(holder: HolderMeta, owner: OwnerReference | None, meta: JsonObject) -> bool:
    """Whether the object belongs to this owner, or is retained from a job of the same name.

    `meta` is the metadata of the object to create.
    """
    if owner is not None:
        controller = find_controller(holder.owner_references)
        return controller is not None and controller.uid == owner.uid
    labels = meta.get("labels")
    retained_from = labels.get(RETAINED_LABEL) if isinstance(labels, dict) else None
    return retained_from is not None and holder.labels.get(RETAINED_LABEL) == retained_from


def is_predecessor(holder: HolderMeta, owner: OwnerReference | None) -> bool:
    """Whether the controller is a deleted job of the same name, so garbage collection is due."""
    controller = find_controller(holder.owner_references)
    return (
        owner is not None
        and controller is not None
        and (controller.kind, controller.name) == (owner.kind, owner.name)
        and controller.api_version.partition("/")[0] == owner.api_version.partition("/")[0]
        and controller.uid != owner.uid
    )


def describe_conflict(kind: Kind[Any], name: str, holder: HolderMeta) -> Conflict:
    """Return the conflict, with whose object it is and what the user can do."""
    controller = find_controller(holder.owner_references)
    if controller is not None:
        ownership = f"belongs to {controller.kind} {controller.name!r}"
    else:
        ownership = f"was created by {', '.join(holder.managers) or 'another client'}"
    return Conflict(
        resource=kind.resource,
        name=name,
        message=f"{kind.kind} {name!r} already exists and {ownership}. "
        "Delete it or choose another name.",
    )
