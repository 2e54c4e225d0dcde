"""The events and the actions that a watcher returns to its driver."""

from collections.abc import Mapping
from typing import ClassVar, Generic, TypeAlias, TypeVar

from msgspec import Struct

T = TypeVar("T")

Key: TypeAlias = tuple[str, str]
"""Namespace and name."""


class Synced(Struct, Generic[T], frozen=True, gc=False):
    """A complete list at one resourceVersion; it replaces the contents of the store.

    `unreadable` are the keys of objects that exist but could not be decoded.
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
    """A frame was skipped because it does not decode; `key` has "" for what is not readable."""

    key: Key
    message: str


class Interrupted(Struct, frozen=True, gc=False):
    """The stream or list failed: close it. The watcher continues after `delay` seconds.

    `reason` is one CamelCase word for a metric, `relist` whether a complete list comes next.
    """

    # Reason for a watch that delivered nothing for its silence limit. It is opened again at once.
    SILENT: ClassVar[str] = "Silent"

    reason: str
    message: str
    delay: float
    relist: bool


Event: TypeAlias = Synced[T] | Upserted[T] | Deleted | Bookmarked | Faulted | Interrupted


class WatchPause(Struct, frozen=True, gc=False):
    """Sleep for this many seconds, then call `Watcher.next`."""

    seconds: float


class FetchPage(Struct, frozen=True, gc=False):
    """GET the collection with this query, and pass the body to `Watcher.page`."""

    query: Mapping[str, str]
    timeout: float  # seconds


class OpenStream(Struct, frozen=True, gc=False):
    """Open a watch with this query, and pass its bytes to `Watcher.receive`."""

    query: Mapping[str, str]
    silence: float  # seconds without a byte until the watch counts as silent
    total: float  # seconds of the whole stream


Action: TypeAlias = WatchPause | FetchPage | OpenStream


class StreamFailure(Struct, frozen=True, gc=False):
    """Why a request or stream failed.

    `status` is the HTTP code, 0 without a response; `retry_after` is in seconds. `silent`: the
    stream delivered nothing for its silence limit.
    """

    message: str
    status: int = 0
    retry_after: float | None = None
    silent: bool = False
