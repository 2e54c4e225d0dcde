"""The store: consistent indexes, replacement of all objects, the newest version."""

import tracemalloc

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from frames import pod
from torchrun_api.kinds.core import Pod
from torchrun_controller.cache.store import Change, Store

NAMES = st.sampled_from(["a", "b", "c", "d"])
ATTEMPTS = st.sampled_from(["0", "1", "2"])


def make(name: str, version: int = 1, attempt: str = "0") -> Pod:
    return msgspec.convert(pod(name, version, attempt), Pod)


def attempts(obj: Pod) -> list[str]:
    return [obj.metadata.labels.attempt]


def version_of(obj: Pod) -> tuple[str, int] | None:
    attempt = obj.metadata.labels.attempt
    return None if attempt == "2" else (attempt, int(obj.metadata.resource_version))


@pytest.fixture
def store() -> Store[Pod]:
    return Store({"attempt": attempts})


def test_starts_empty(store: Store[Pod]) -> None:
    assert (len(store), list(store), store.resource_version) == (0, [], 0)
    assert store.get("team-a", "a") is None
    assert store.by_index("attempt", "0") == ()


def test_unused_index_values_are_removed(store: Store[Pod]) -> None:
    """A cache lives for months, and each job adds a value to an index."""
    for number in range(200):
        store.upsert(make("a", number, str(number)), number)
    tracemalloc.start()
    for number in range(200, 2200):
        store.upsert(make("a", number, str(number)), number)
        if number % 2:
            store.delete("team-a", "a", number)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 100_000, "bytes"


def test_an_unknown_index_is_an_error(store: Store[Pod]) -> None:
    with pytest.raises(KeyError, match="node"):
        store.by_index("node", "n1")


def test_upsert_returns_the_previous_object(store: Store[Pod]) -> None:
    one, two = make("a", 1), make("a", 2)
    assert store.upsert(one, 1) == Change(None, one)
    assert store.upsert(two, 2) == Change(one, two)
    assert store.get("team-a", "a") is two


def test_unchanged_is_still_an_upsert(store: Store[Pod]) -> None:
    one = make("a", 1)
    store.upsert(one, 1)
    assert store.upsert(one, 1) == Change(one, one)
    assert store.replace([one], 5) == [Change(one, one)]


def test_delete_returns_the_last_known_state(store: Store[Pod]) -> None:
    one = make("a", 1)
    store.upsert(one, 1)
    change = store.delete("team-a", "a", 2)
    assert change == Change(one, None)
    assert change.object is one
    assert store.delete("team-a", "a", 2) is None


def test_an_object_moves_from_index_value_to_index_value(store: Store[Pod]) -> None:
    store.upsert(make("a", 1, "0"), 1)
    moved = make("a", 2, "1")
    store.upsert(moved, 2)
    assert store.by_index("attempt", "0") == ()
    assert store.by_index("attempt", "1") == (moved,)


def test_an_index_may_find_by_several_values_or_none() -> None:
    store: Store[Pod] = Store({"all": lambda obj: ["x", "y", "x"], "none": lambda obj: []})
    one = make("a")
    store.upsert(one, 1)
    assert store.by_index("all", "x") == store.by_index("all", "y") == (one,)
    store.upsert(one, 1)
    store.delete("team-a", "a", 2)
    assert store.by_index("all", "x") == ()


def test_sums_are_by_group_and_a_copy() -> None:
    store: Store[Pod] = Store(tallies={"versions": version_of})
    for name, version, attempt in (("a", 3, "0"), ("b", 4, "0"), ("c", 5, "1"), ("d", 6, "2")):
        store.upsert(make(name, version, attempt), version)
    sums = store.sums("versions")
    assert sums == {"0": 7, "1": 5}
    sums.clear()
    store.delete("team-a", "c", 9)
    assert store.sums("versions") == {"0": 7}, "sums of 0 are omitted"
    with pytest.raises(KeyError, match="another"):
        store.sums("another")


class TestReplace:
    def test_reports_deletions_first_with_the_last_known_state(self, store: Store[Pod]) -> None:
        gone, old, new = make("gone"), make("a", 1), make("a", 2)
        store.upsert(gone, 1)
        store.upsert(old, 1)
        added = make("b", 2)
        assert store.replace([new, added], 9) == [
            Change(gone, None),
            Change(old, new),
            Change(None, added),
        ]
        assert sorted(store.by_index("attempt", "0"), key=lambda each: each.metadata.name) == [
            new,
            added,
        ]

    def test_keeps_unreadable_objects_that_exist(self, store: Store[Pod]) -> None:
        kept = make("kept")
        store.upsert(kept, 1)
        assert store.replace([], 9, {("team-a", "kept"), ("", "")}) == []
        assert store.get("team-a", "kept") is kept
        assert store.by_index("attempt", "0") == (kept,)

    def test_a_listed_object_replaces_an_unreadable_one(self, store: Store[Pod]) -> None:
        old, new = make("a", 1), make("a", 2)
        store.upsert(old, 1)
        assert store.replace([new], 9, {("team-a", "a")}) == [Change(old, new)]

    def test_accepts_an_older_version_from_a_list(self, store: Store[Pod]) -> None:
        store.replace([], 9)
        store.replace([], 4)
        assert store.resource_version == 4


def test_events_never_lower_the_version(store: Store[Pod]) -> None:
    store.upsert(make("a"), 7)
    store.advance(5)
    store.delete("team-a", "none", 6)
    assert store.resource_version == 7
    store.advance(8)
    assert store.resource_version == 8


def test_iteration_is_over_a_snapshot(store: Store[Pod]) -> None:
    store.upsert(make("a"), 1)
    for _ in store:
        store.upsert(make("b"), 2)
    assert len(store) == 2


class StoreMachine(RuleBasedStateMachine):
    """After any history, objects, indexes and reported changes are consistent."""

    def __init__(self) -> None:
        super().__init__()
        self.store: Store[Pod] = Store({"attempt": attempts}, {"versions": version_of})
        self.model: dict[str, Pod] = {}
        self.reported: dict[str, Pod] = {}
        self.version = 0

    def record(self, change: Change[Pod] | None) -> None:
        if change is None:
            return
        name = change.object.metadata.name
        assert self.reported.get(name) is change.old
        if change.new is None:
            del self.reported[name]
        else:
            self.reported[name] = change.new

    @rule(name=NAMES, attempt=ATTEMPTS)
    def upsert(self, name: str, attempt: str) -> None:
        self.version += 1
        self.model[name] = make(name, self.version, attempt)
        self.record(self.store.upsert(self.model[name], self.version))

    @rule(name=NAMES)
    def delete(self, name: str) -> None:
        self.version += 1
        self.model.pop(name, None)
        self.record(self.store.delete("team-a", name, self.version))

    @rule(names=st.sets(NAMES), attempt=ATTEMPTS, unreadable=st.sets(NAMES))
    def replace(self, names: set[str], attempt: str, unreadable: set[str]) -> None:
        self.version += 1
        kept = {name: obj for name, obj in self.model.items() if name in unreadable - names}
        self.model = kept | {name: make(name, self.version, attempt) for name in names}
        listed = [self.model[name] for name in names]
        keys = {("team-a", name) for name in unreadable}
        for change in self.store.replace(listed, self.version, keys):
            self.record(change)

    @invariant()
    def sums_in_step(self) -> None:
        wanted: dict[str, int] = {}
        for obj in self.model.values():
            if share := version_of(obj):
                wanted[share[0]] = wanted.get(share[0], 0) + share[1]
        assert self.store.sums("versions") == wanted

    @invariant()
    def in_step(self) -> None:
        assert {obj.metadata.name: obj for obj in self.store} == self.model == self.reported
        assert len(self.store) == len(self.model)
        assert self.store.resource_version == self.version
        for attempt in ("0", "1", "2"):
            matches = self.store.by_index("attempt", attempt)
            wanted = [obj for obj in self.model.values() if attempts(obj) == [attempt]]
            assert sorted(obj.metadata.name for obj in matches) == sorted(
                obj.metadata.name for obj in wanted
            )


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(deadline=None)
