"""What a watcher tells its driver, and what it tells it to do."""

from collections.abc import Mapping
from typing import ClassVar, Generic, TypeAlias, TypeVar

from msgspec import Struct

T = TypeVar("T")

Key: TypeAlias = tuple[str, str]
"""Namespace and name."""


class Synced(Struct, Generic[T], frozen=True, gc=False):
    """The whole truth at one resourceVersion; it replaces all that was known.

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
    """A frame that could not be used was skipped; `key` has "" for what was not legible either."""

    key: Key
    message: str


class Interrupted(Struct, frozen=True, gc=False):
    """The stream or list is no good any more: close it. It goes on `delay` seconds from now.

    `reason` is one CamelCase word for a metric, `relist` whether a whole list comes next.
    """

    # Of a watch alone, opened anew at once: it may be dead, but most of the time nothing happens.
    SILENT: ClassVar[str] = "Silent"

    reason: str
    message: str
    delay: float
    relist: bool


Event: TypeAlias = Synced[T] | Upserted[T] | Deleted | Bookmarked | Faulted | Interrupted


class Wait(Struct, frozen=True, gc=False):
    """Do nothing for so many seconds, then ask again."""

    seconds: float


class FetchPage(Struct, frozen=True, gc=False):
    """GET the collection with this query and hand over the body."""

    query: Mapping[str, str]
    timeout: float


class OpenStream(Struct, frozen=True, gc=False):
    """Open a watch with this query and hand over its bytes; `silence` and `total` are seconds."""

    query: Mapping[str, str]
    silence: float
    total: float


Action: TypeAlias = Wait | FetchPage | OpenStream


class Failure(Struct, frozen=True, gc=False):
    """Why a request or stream ended other than well; `status` 0 means that no answer came.

    `silent` is a stream on which nothing came for as long as it may be silent.
    """

    message: str
    status: int = 0
    retry_after: float | None = None
    silent: bool = False
