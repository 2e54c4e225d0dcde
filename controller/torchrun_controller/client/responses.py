"""The fields that are read of answers to writes, and of objects that have a name of ours."""

from datetime import datetime

import msgspec
from msgspec import field

from torchrun_api.meta import OwnerReference, Wire


class Meta(Wire, frozen=True, kw_only=True):
    """Identity and version of an object; all empty in the Status that answers some deletes."""

    uid: str = ""
    resource_version: str = ""
    deletion_timestamp: datetime | None = None
    owner_references: tuple[OwnerReference, ...] = ()


class _Manager(Wire, frozen=True, kw_only=True):
    manager: str = ""


class HolderMeta(Meta, frozen=True, kw_only=True):
    """Fields that also show whose an object is."""

    labels: dict[str, str] = field(default_factory=dict)
    managed_fields: tuple[_Manager, ...] = ()

    @property
    def managers(self) -> list[str]:
        """The managers that have set fields of it, sorted."""
        return sorted({entry.manager for entry in self.managed_fields} - {""})


class _Answer(Wire, frozen=True, kw_only=True):
    metadata: Meta = Meta()


class _Holder(Wire, frozen=True, kw_only=True):
    metadata: HolderMeta


_decode_answer = msgspec.json.Decoder(_Answer).decode
_decode_holder = msgspec.json.Decoder(_Holder).decode


def read_deleted(body: bytes) -> Meta:
    """Read the answer to a delete: the object being deleted, or a Status. Raises ValueError."""
    meta = _decode_answer(body).metadata
    if meta.resource_version:
        int(meta.resource_version)
    return meta


def read_object(body: bytes) -> Meta:
    """Read an object from a GET or from the answer to a write. Raises ValueError."""
    return _identified(_decode_answer(body).metadata)


def read_holder(body: bytes) -> HolderMeta:
    """Read an object that has a name of ours. Raises ValueError."""
    meta = _decode_holder(body).metadata
    _identified(meta)
    return meta


def _identified(meta: Meta) -> Meta:
    if not meta.uid:
        raise ValueError("an object without metadata.uid")
    int(meta.resource_version)
    return meta
