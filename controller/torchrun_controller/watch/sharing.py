"""One copy of the strings that many objects repeat."""

from sys import intern
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import force_setattr

from torchrun_api.core import Pod
from torchrun_api.kinds import Object
from torchrun_api.meta import ChildLabels, ChildMeta

T = TypeVar("T", bound=Object)

_NAMESPACE = ("namespace",)
_OWNER = ("api_version", "kind", "name", "uid")
_NODE = ("node_name",)
_TYPE = ("type",)


def shared(obj: T) -> T:
    """Replace the strings of a freshly decoded object by interned ones, and return it.

    Nobody else has seen the object, and equal values stay equal: it may be touched though frozen.
    Interned strings go when the last object that holds them goes.
    """
    metadata = obj.metadata
    if isinstance(metadata, ChildMeta):
        _intern(metadata, _NAMESPACE)
        _intern(metadata.labels, ChildLabels.__struct_fields__)
        for owner in metadata.owner_references:
            _intern(owner, _OWNER)
    if isinstance(obj, Pod):
        _intern(obj.spec, _NODE)
        for condition in obj.status.conditions:
            _intern(condition, _TYPE)
    return obj


def _intern(struct: Struct, fields: tuple[str, ...]) -> None:
    for field in fields:
        force_setattr(struct, field, intern(getattr(struct, field)))
