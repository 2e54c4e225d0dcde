"""Server-side apply on plain JSON: field ownership and merge.

A field is a path of keys. An entry of an associative list is named by its key; other lists are one
value. Source: kubernetes.io, "Server-Side Apply"; structured-merge-diff. Left out, as nothing here
needs it: lists with several keys, sets, and ownership of maps and list entries apart from what they
hold.
"""

from collections.abc import Iterator
from typing import Any, TypeAlias

from msgspec import Struct

from bodies import Body

Path: TypeAlias = tuple[str | tuple[str, str], ...]
Fields: TypeAlias = frozenset[Path]

# The key of each associative list that our objects have, by the list's own name.
LIST_KEYS = {
    "conditions": "type",
    "ownerReferences": "uid",
    "containers": "name",
    "initContainers": "name",
    "containerStatuses": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
}
# What an apply has to name its object, and what only the server writes.
_NOT_OWNED = frozenset({"apiVersion", "kind"})
_OF_SERVER = frozenset(
    {
        "name",
        "namespace",
        "uid",
        "resourceVersion",
        "generation",
        "creationTimestamp",
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
        "managedFields",
    }
)


class Manager(Struct, frozen=True):
    """A field manager: a name with an operation (apply or update), and the subresource."""

    name: str
    operation: str  # Apply or Update
    subresource: str = ""


Owners: TypeAlias = dict[Manager, Fields]


class ConflictError(Exception):
    """Another manager owns a field and has another value for it."""

    def __init__(self, path: Path, manager: Manager) -> None:
        super().__init__(f'conflict with "{manager.name}": {path_text(path)}')


def applied(
    present: Body, wanted: Body, owners: Owners, manager: Manager, *, force: bool
) -> tuple[Body, Owners]:
    """The object after `manager` applies exactly the fields of `wanted`. Raises ConflictError."""
    new = dict(leaves(wanted))
    others = {other: paths for other, paths in owners.items() if other != manager}
    for other, paths in others.items():
        lost = {path for path in new if path in paths and _differs(present, path, new[path])}
        if lost and not force:
            raise ConflictError(min(lost, key=str), other)
        others[other] = paths - lost
    elsewhere = frozenset().union(*others.values())
    merged = present
    for path in sorted(owners.get(manager, frozenset()) - new.keys() - elsewhere, key=str):
        if not _holds_more(value_at(merged, path)):
            merged = without(merged, path)
    for path, value in new.items():
        old = value_at(merged, path)
        if old != value and (value != {} or not _holds_more(old)):
            merged = with_value(merged, path, value)
    return merged, _without_empty({**others, manager: frozenset(new)})


def updated(before: Body, after: Body, owners: Owners, manager: Manager) -> Owners:
    """The owners after a plain write. The writer owns the fields that it changed."""
    # Skip parts that are the same object in both: most writes change one of three.
    parts = {key for key in before.keys() | after.keys() if before.get(key) is not after.get(key)}
    old, new = (
        dict(leaves({key: body[key] for key in parts if key in body})) for body in (before, after)
    )
    changed = frozenset(path for path, value in new.items() if old.get(path) != value)
    others = {
        other: frozenset(p for p in paths if p[0] not in parts or p in new) - changed
        for other, paths in owners.items()
    }
    return _without_empty({**others, manager: others.get(manager, frozenset()) | changed})


def _differs(present: Body, path: Path, value: Any) -> bool:
    old = value_at(present, path)
    return bool(old != value and not (value == {} and _holds_more(old)))


def _holds_more(value: Any) -> bool:
    """Whether a map is not empty, so that its fields have the owners."""
    return isinstance(value, dict) and bool(value)


def _without_empty(owners: Owners) -> Owners:
    return {manager: paths for manager, paths in owners.items() if paths}


def leaves(body: Body) -> Iterator[tuple[Path, Any]]:
    """Every ownable field with its value."""
    for key, value in body.items():
        if key in _NOT_OWNED:
            continue
        if key == "metadata":
            value = {name: each for name, each in value.items() if name not in _OF_SERVER}
        yield from _leaves((key,), key, value)


def _leaves(path: Path, name: str, value: Any) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, dict) and value:
        for key, each in value.items():
            yield from _leaves((*path, key), key, each)
    elif isinstance(value, list) and name in LIST_KEYS and _have(LIST_KEYS[name], value):
        key = LIST_KEYS[name]
        for entry in value:
            yield from _leaves((*path, (key, entry[key])), "", entry)
    else:
        yield path, value


def _have(key: str, entries: list[Any]) -> bool:
    """Whether each entry has a unique key. Otherwise the list, which schemas refuse, is one value."""
    keys = [entry.get(key) for entry in entries if isinstance(entry, dict)]
    texts = {each for each in keys if isinstance(each, str)}
    return len(texts) == len(entries)


def value_at(body: Any, path: Path) -> Any:
    """The value at a path; None without one."""
    for step in path:
        if isinstance(step, tuple):
            body = next((e for e in body or () if e.get(step[0]) == step[1]), None)
        else:
            body = body.get(step) if isinstance(body, dict) else None
    return body


def with_value(body: Any, path: Path, value: Any) -> Any:
    """A copy of the body with the value at the path."""
    if not path:
        return value
    step, rest = path[0], path[1:]
    if isinstance(step, str):
        fields_of_body = body if isinstance(body, dict) else {}
        return {**fields_of_body, step: with_value(fields_of_body.get(step), rest, value)}
    entries = list(body or ())
    for at, entry in enumerate(entries):
        if entry.get(step[0]) == step[1]:
            entries[at] = with_value(entry, rest, value)
            return entries
    return [*entries, with_value({step[0]: step[1]}, rest, value)]


def without(body: Any, path: Path) -> Any:
    """A copy of the body without the value at the path, and without maps that become empty."""
    step, rest = path[0], path[1:]
    if isinstance(step, str):
        if not isinstance(body, dict) or step not in body:
            return body
        left = without(body[step], rest) if rest else None
        others = {key: value for key, value in body.items() if key != step}
        return others | {step: left} if left else others
    entries = [
        entry if entry.get(step[0]) != step[1] else without(entry, rest) for entry in body or ()
    ]
    return [entry for entry in entries if entry]


def path_text(path: Path) -> str:
    """A path as the API server writes it."""
    steps = (f'[{s[0]}="{s[1]}"]' if isinstance(s, tuple) else f".{s}" for s in path)
    return "".join(steps)
