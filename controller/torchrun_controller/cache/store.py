"""The cache of one kind and its indexes: synchronous, with the informer as its only writer.

Every method leaves objects and indexes consistent, and none awaits. So all readers on the event
loop see one consistent state.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Generic, TypeAlias, TypeVar

from msgspec import Struct

from torchrun_api.kinds.resources import Object

T = TypeVar("T", bound=Object)

Key: TypeAlias = tuple[str, str]
"""Namespace and name."""

Indexer: TypeAlias = Callable[[T], Iterable[str]]
"""Returns the index values of an object. Must not raise for any object that users can write."""


Tally: TypeAlias = Callable[[T], tuple[str, int] | None]
"""Returns the group of an object and its amount in the sum, or None. Must not raise."""


class Change(Struct, Generic[T], frozen=True, gc=False):
    """A change of one object; `old` is None for a new object, `new` for a deleted one."""

    old: T | None
    new: T | None

    @property
    def object(self) -> T:
        """The new object, or the last state of a deleted one."""
        obj = self.old if self.new is None else self.new
        assert obj is not None, "a change has at least one side"
        return obj


class Store(Generic[T]):
    """Objects by namespace and name, indexes, and sums over groups of objects.

    Sums are updated with each change, so reading them does not depend on the number of objects. The
    size is bounded by the objects that match the informer's selector.
    """

    def __init__(
        self,
        indexers: Mapping[str, Indexer[T]] | None = None,
        tallies: Mapping[str, Tally[T]] | None = None,
    ) -> None:
        self._indexers = dict(indexers or {})
        self._tallies = dict(tallies or {})
        self._objects: dict[Key, T] = {}
        self._indexes = self._no_entries()
        self._sums = self._no_sums()
        self._resource_version = 0

    @property
    def resource_version(self) -> int:
        """The newest resourceVersion that the store reflects, 0 before the first list."""
        return self._resource_version

    def __len__(self) -> int:
        return len(self._objects)

    def __iter__(self) -> Iterator[T]:
        return iter(tuple(self._objects.values()))

    def get(self, namespace: str, name: str) -> T | None:
        """Return the cached object; None if there is none."""
        return self._objects.get((namespace, name))

    def by_index(self, index: str, value: str) -> tuple[T, ...]:
        """Return the objects that `index` lists under `value`. Raises KeyError for an unknown
        index.
        """
        return tuple(self._indexes[index].get(value, {}).values())

    def sums(self, tally: str) -> dict[str, int]:
        """Return a tally's sums by group, without zeros. Raises KeyError for an unknown tally."""
        return self._sums[tally].copy()

    def upsert(self, obj: T, resource_version: int) -> Change[T]:
        """Add an object, or replace the one of the same name."""
        key = _key(obj)
        old_object = self._objects.get(key)
        if old_object is not None:
            self._unindex(key, old_object)
        self._objects[key] = obj
        self._index(key, obj)
        self.advance(resource_version)
        return Change(old_object, obj)

    def delete(self, namespace: str, name: str, resource_version: int) -> Change[T] | None:
        """Remove an object; None if it is not cached."""
        self.advance(resource_version)
        old_object = self._objects.pop((namespace, name), None)
        if old_object is None:
            return None
        self._unindex((namespace, name), old_object)
        return Change(old_object, None)

    def replace(
        self,
        objects: Iterable[T],
        resource_version: int,
        unreadable: AbstractSet[Key] = frozenset(),
    ) -> list[Change[T]]:
        """Replace the contents by a whole list.

        Returns a change for each cached object that is not in the list, then one for each object of
        the list, changed or not. Objects of `unreadable` exist and stay as cached. The version
        becomes that of the list even if it is older: etcd may have been restored.
        """
        listed_objects = {_key(obj): obj for obj in objects}
        previous_objects = self._objects
        retained_objects = {
            key: old_object
            for key, old_object in previous_objects.items()
            if key in unreadable and key not in listed_objects
        }
        deletions = [
            Change(old_object, None)
            for key, old_object in previous_objects.items()
            if key not in listed_objects and key not in retained_objects
        ]
        self._objects = retained_objects | listed_objects
        self._indexes, self._sums = self._no_entries(), self._no_sums()
        for key, obj in self._objects.items():
            self._index(key, obj)
        self._resource_version = resource_version
        return deletions + [
            Change(previous_objects.get(key), obj) for key, obj in listed_objects.items()
        ]

    def advance(self, resource_version: int) -> None:
        """Record that the store reflects all changes up to this version, as after a bookmark."""
        self._resource_version = max(self._resource_version, resource_version)

    def _no_entries(self) -> dict[str, dict[str, dict[Key, T]]]:
        return {index: {} for index in self._indexers}

    def _no_sums(self) -> dict[str, dict[str, int]]:
        return {tally: {} for tally in self._tallies}

    def _index(self, key: Key, obj: T) -> None:
        for index, indexer in self._indexers.items():
            for value in indexer(obj):
                self._indexes[index].setdefault(value, {})[key] = obj
        self._count(obj, 1)

    def _unindex(self, key: Key, obj: T) -> None:
        for index, indexer in self._indexers.items():
            entries = self._indexes[index]
            for value in indexer(obj):
                matches = entries.get(value, {})
                matches.pop(key, None)
                if not matches:
                    entries.pop(value, None)
        self._count(obj, -1)

    def _count(self, obj: T, sign: int) -> None:
        for tally, share_of in self._tallies.items():
            share = share_of(obj)
            if share is None:
                continue
            group, amount = share
            sums = self._sums[tally]
            sums[group] = sums.get(group, 0) + sign * amount
            if sums[group] == 0:
                del sums[group]


def _key(obj: Object) -> Key:
    return obj.metadata.namespace, obj.metadata.name
