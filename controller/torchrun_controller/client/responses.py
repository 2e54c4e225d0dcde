"""The fields that are read from responses to writes, and from the object that has a taken name."""

from datetime import datetime

import msgspec
from msgspec import field

from torchrun_api.meta import ChildMeta, OwnerReference, Wire


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
