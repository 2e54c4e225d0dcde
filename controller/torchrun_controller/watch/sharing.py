"""Strings and parts that many objects share are stored once."""

import sys
from sys import intern
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import force_setattr

from torchrun_api.kinds.core import Pod
from torchrun_api.kinds.meta import ChildLabels, ChildMeta
from torchrun_api.kinds.resources import Object

T = TypeVar("T", bound=Object)

_NAMESPACE = ("namespace",)
_OWNER = ("api_version", "kind", "name", "uid")
_NODE = ("node_name",)
_TYPE = ("type",)
_NAME = ("name",)
# Equal for all pods of a gang, as a rule.
_PARTS = ("annotations", "owner_references")
_SPEC_PARTS = ("containers", "init_containers", "overhead", "resources")


def frees_interned_strings(version: tuple[int, int, int]) -> bool:
    """Whether this version of Python frees an interned string with the last object that uses it.

    Python 3.12 did not, up to 3.12.6 (https://github.com/python/cpython/issues/113993, corrected by
    https://github.com/python/cpython/pull/123065).
    """
    return not (3, 12, 0) <= version < (3, 12, 7)


_SHARES = frees_interned_strings(sys.version_info[:3])


def intern_strings(obj: T) -> T:
    """Replace the strings of a freshly decoded object by interned ones, and return it.

    The object is frozen, but it has no other reader yet and its fields stay equal. If Python never
    frees interned strings, nothing is shared: a pod then takes more memory, but memory does not
    grow with every job that there ever was.
    """
    if not _SHARES:
        return obj
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
        for container in obj.status.container_statuses:
            _intern(container, _NAME)
    return obj


def share_parts(obj: T, similar: Object | None) -> T:
    """Let a freshly decoded object use those parts of `similar` that are equal, and return it.

    `similar` is its last state, or the object that was decoded before it: often a pod of the same
    gang, or a job of the same manifest, whose templates may have a megabyte.
    """
    if similar is not None and isinstance(obj.metadata, ChildMeta):
        _share(obj.metadata, similar.metadata, _PARTS)
    spec, other = getattr(obj, "spec", None), getattr(similar, "spec", None)
    if isinstance(spec, Struct) and isinstance(other, type(spec)):
        _share(spec, other, _SPEC_PARTS if isinstance(obj, Pod) else spec.__struct_fields__)
    return obj


def _share(struct: Struct, similar: Struct, parts: tuple[str, ...]) -> None:
    for part in parts:
        known = getattr(similar, part)
        if getattr(struct, part) == known:
            force_setattr(struct, part, known)


def _intern(struct: Struct, fields: tuple[str, ...]) -> None:
    for field in fields:
        force_setattr(struct, field, intern(getattr(struct, field)))
