"""The events and the actions that a watcher returns to its driver."""

from collections.abc import Mapping
from typing import ClassVar, Generic, TypeAlias, TypeVar

from msgspec import Struct

T = TypeVar("T")

Key: TypeAlias = tuple[str, str]
"""Namespace and name."""


class Synced(Struct, Generic[T], frozen=True, gc=False):
    """The complete state at one resourceVersion; it replaces everything known.

    `unreadable` are objects that exist but could not be decoded: they have not vanished.
    """

    objects: list[T]
    resource_version: int
    unreadable: frozenset[Key] = frozenset()


class Upserted(Struct, Generic[T], frozen=True, gc=False):
    """An object was added or changed."""

    object: T
    resource_version: int


class Deleted(Struct, frozen=True, gc=False):
    """An object is gone; its last known state is in the store."""

    key: Key
    resource_version: int


class Bookmarked(Struct, frozen=True, gc=False):
    """Nothing has changed up to this resourceVersion."""

    resource_version: int


class Faulted(Struct, frozen=True, gc=False):
    """A frame was skipped because it is unusable; `key` has "" for what was not legible."""

    key: Key
    message: str


class Interrupted(Struct, frozen=True, gc=False):
    """The stream or list failed: close it. The watcher continues after `delay` seconds.

    `reason` is one CamelCase word for a metric, `relist` whether a complete list comes next.
    """

    # For a watch only, which is opened again at once: it may be dead, or nothing happened.
    SILENT: ClassVar[str] = "Silent"

    reason: str
    message: str
    delay: float
    relist: bool


Event: TypeAlias = Synced[T] | Upserted[T] | Deleted | Bookmarked | Faulted | Interrupted


class Wait(Struct, frozen=True, gc=False):
    """Do nothing for this many seconds, then ask again."""

    seconds: float


class FetchPage(Struct, frozen=True, gc=False):
    """GET the collection with this query and pass on the body."""

    query: Mapping[str, str]
    timeout: float


class OpenStream(Struct, frozen=True, gc=False):
    """Open a watch with this query and pass on its bytes; `silence` and `total` in seconds."""

    query: Mapping[str, str]
    silence: float
    total: float


Action: TypeAlias = Wait | FetchPage | OpenStream


class Failure(Struct, frozen=True, gc=False):
    """Why a request or stream failed; `status` 0 means that no answer came.

    `silent`: nothing came over the stream for its silence limit.
    """

    message: str
    status: int = 0
    retry_after: float | None = None
    silent: bool = False
