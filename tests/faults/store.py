"""Objects by version, and every change in order, like etcd and the watch cache.

Objects are never changed in place, so a reference keeps its state.
"""

from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import Struct

from bodies import Body
from faults.fields import Owners

Resource: TypeAlias = tuple[str, str]  # apiVersion and plural
Key: TypeAlias = tuple[str, str]  # namespace and name
Verb: TypeAlias = Literal["ADDED", "MODIFIED", "DELETED"]

_encode = msgspec.json.Encoder().encode


class Stored(Struct, frozen=True):
    """One state of an object."""

    body: Body
    owners: Owners

    @property
    def version(self) -> int:
        return int(self.body["metadata"]["resourceVersion"])


class Change(Struct):
    """One change: the old and the new state of an object."""

    version: int
    resource: Resource
    verb: Verb
    old: Body | None
    body: Body  # for a deleted object, the last state with the version of the deletion
    writer: str
    _text: bytes = b""

    @property
    def text(self) -> bytes:
        """The object as JSON."""
        if not self._text:
            self._text = _encode(self.body)
        return self._text

    @property
    def name(self) -> str:
        return short_name(self.resource[1], self.body["metadata"]["name"])


Listener: TypeAlias = Callable[[Change], None]


class Store:
    """All objects and their history. The empty store has version 1, so the first change has 2."""

    def __init__(self) -> None:
        self.version = 1
        self.changes: list[Change] = []
        self._objects: dict[Resource, dict[Key, Stored]] = {}
        self._listeners: list[Listener] = []

    def subscribe(self, listener: Listener) -> None:
        """Call the listener synchronously with each change."""
        self._listeners.append(listener)

    def unsubscribe(self, listener: Listener) -> None:
        self._listeners.remove(listener)

    def get(self, resource: Resource, key: Key) -> Stored | None:
        return self._objects.get(resource, {}).get(key)

    def bodies(self, resource: Resource, namespace: str = "") -> Iterator[Body]:
        """All objects of a kind, sorted by name."""
        for key, stored in sorted(self._objects.get(resource, {}).items()):
            if namespace in ("", key[0]):
                yield stored.body

    def everything(self) -> Iterator[tuple[Resource, Body]]:
        for resource in sorted(self._objects):
            for body in self.bodies(resource):
                yield resource, body

    def past(self, resource: Resource, version: int) -> dict[Key, Body]:
        """The objects of a kind at a version."""
        objects: dict[Key, Body] = {}
        for change in self.changes:
            if change.version > version:
                break
            if change.resource == resource:
                key = key_of(change.body)
                objects[key] = change.body
                if change.verb == "DELETED":
                    del objects[key]
        return objects

    def put(self, resource: Resource, body: Body, owners: Owners, writer: str) -> Body:
        """Create or replace an object, with a new version."""
        objects = self._objects.setdefault(resource, {})
        key = key_of(body)
        previous = objects.get(key)
        body = self._stamped(body)
        objects[key] = Stored(body, owners)
        verb: Verb = "MODIFIED" if previous else "ADDED"
        self._notify(
            Change(self.version, resource, verb, previous.body if previous else None, body, writer)
        )
        return body

    def remove(self, resource: Resource, key: Key, writer: str) -> Body:
        """Remove an object. Raises KeyError if it does not exist."""
        old = self._objects[resource].pop(key).body
        body = self._stamped(old)
        self._notify(Change(self.version, resource, "DELETED", old, body, writer))
        return body

    def _stamped(self, body: Body) -> Body:
        self.version += 1
        return {**body, "metadata": {**body["metadata"], "resourceVersion": str(self.version)}}

    def _notify(self, change: Change) -> None:
        self.changes.append(change)
        for listener in list(self._listeners):
            listener(change)


def short_name(plural: str, name: str) -> str:
    """The object in short form, without the random suffix of events."""
    return f"{plural}/{name.rpartition('.')[0] if plural == 'events' else name}"


def key_of(body: Body) -> Key:
    meta: dict[str, Any] = body["metadata"]
    return meta.get("namespace", ""), meta["name"]
