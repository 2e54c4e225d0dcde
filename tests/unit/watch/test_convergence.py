"""The store converges to the state of the server under random faults of server and network.

Hypothesis lets a model of an API server mutate, compact, refuse and disconnect. At any time the
store equals the state of the server at the resourceVersion of the store. Without further faults, it
reaches the newest version.
"""

import itertools
from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from frames import bookmark, error, frame, page, pod
from profiles import examples
from torchrun_api.json import JsonObject
from torchrun_api.kinds.core import Pod
from torchrun_api.kinds.resources import PODS
from torchrun_controller.cache.store import Change, Store
from torchrun_controller.watch import (
    Bookmarked,
    Deleted,
    Event,
    Faulted,
    FetchPage,
    Interrupted,
    OpenStream,
    StreamFailure,
    Synced,
    Upserted,
    Watcher,
    WatchPause,
)

NAMES = ("a", "b", "c", "d")
State = dict[str, str]  # name to resourceVersion


class Server:
    """Objects, their history, and the versions that are not compacted."""

    def __init__(self) -> None:
        self.version = 10
        self.compacted = 0
        self.objects: dict[str, JsonObject] = {}
        self.log: list[tuple[int, bytes]] = []
        self.history: dict[int, State] = {self.version: {}}
        self.snapshots: dict[str, list[JsonObject]] = {}

    def mutate(self, name: str, delete: bool) -> None:
        if delete and name not in self.objects:
            return
        self.version += 1
        obj = pod(name, self.version)
        if delete:
            del self.objects[name]
            line = frame("DELETED", obj)
        else:
            line = frame("MODIFIED" if name in self.objects else "ADDED", obj)
            self.objects[name] = obj
        self.log.append((self.version, line))
        self.history[self.version] = {
            each: obj["metadata"]["resourceVersion"] for each, obj in self.objects.items()
        }

    def since(self, version: int) -> bytes:
        return b"".join(line for at, line in self.log if at > version)


class World:
    """Runs a watcher against the server and applies its events to a store."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.server = Server()
        self.streams_lists = data.draw(st.booleans())
        plain = data.draw(st.integers(1, 3))
        self.watcher = Watcher(PODS, lambda: 0.5, page_size=1, plain_pages=plain)
        self.store: Store[Pod] = Store({"attempt": lambda obj: [obj.metadata.labels.attempt]})
        self.replayed: State = {}
        self.now = 0.0
        self.well_behaved = False

    def choose(self, *choices: str) -> str:
        return choices[0] if self.well_behaved else self.data.draw(st.sampled_from(choices))

    def mutate(self) -> None:
        for _ in range(0 if self.well_behaved else self.data.draw(st.integers(0, 3))):
            self.server.mutate(
                self.data.draw(st.sampled_from(NAMES)), self.data.draw(st.booleans())
            )
        if not self.well_behaved and self.data.draw(st.integers(0, 5)) == 0:
            self.server.compacted = self.server.version

    def step(self) -> None:
        self.mutate()
        match self.watcher.next(self.now):
            case WatchPause(seconds=seconds):
                assert 0 < seconds <= 60
                self.now += seconds
            case FetchPage(query=query):
                self.fetch(dict(query))
            case OpenStream(query=query):
                self.stream(dict(query))

    def fail(self, status: int) -> None:
        self.take(self.watcher.failed(StreamFailure("model", status), self.now))

    def fetch(self, query: dict[str, str]) -> None:
        token, limit = query.get("continue", ""), int(query.get("limit", "1000000"))
        version, start = (int(part) for part in (token or f"{self.server.version}:0").split(":"))
        if token and version < self.server.compacted:
            return self.fail(410)
        match self.choose("answer", "500", "unreached", "garbage"):
            case "500":
                return self.fail(500)
            case "unreached":
                return self.fail(0)
            case "garbage":
                return self.take(self.watcher.page(b"<html>", self.now))
        if not token:
            self.server.snapshots[str(version)] = list(self.server.objects.values())
        snapshot = self.server.snapshots[str(version)]
        more = f"{version}:{start + limit}" if start + limit < len(snapshot) else ""
        body = page(snapshot[start : start + limit], version, more)
        return self.take(self.watcher.page(body, self.now))

    def stream(self, query: dict[str, str]) -> None:
        listing = "sendInitialEvents" in query
        if listing and not self.streams_lists:
            return self.fail(422)
        match self.choose("open", "unreached", "429", "500"):
            case "unreached":
                return self.fail(0)
            case "429":
                return self.fail(429)
            case "500":
                return self.fail(500)
        self.watcher.record_open(self.now)
        for chunk in self.chunks(self.lines(listing, int(query.get("resourceVersion", "0")))):
            events = self.watcher.receive(chunk, self.now)
            self.take(events)
            if events and isinstance(events[-1], Interrupted):
                return None
        self.now += 300 if self.well_behaved else self.data.draw(st.sampled_from([0.1, 5.0, 300.0]))
        if self.choose("closed", "broken") == "closed":
            return self.take(self.watcher.closed(self.now))
        return self.fail(0)

    def lines(self, listing: bool, version: int) -> Iterator[bytes]:
        if not listing and version < self.server.compacted:
            yield error(410, "Expired")
            return
        if listing:
            version = self.server.version
            objects = list(self.server.objects.values())
            if not self.well_behaved:
                objects = self.data.draw(st.permutations(objects))
            yield from (frame("ADDED", obj) for obj in objects)
            self.mutate()
            yield self.server.since(version)
            version = self.server.version
            yield bookmark(version, end=True)
        for _ in range(1 if self.well_behaved else self.data.draw(st.integers(0, 4))):
            match self.choose("events", "bookmark", "garbage", "500", "410"):
                case "events":
                    yield self.server.since(version)
                    version = self.server.version
                    self.mutate()
                case "bookmark":
                    yield bookmark(version)
                case "garbage":
                    yield b"<html>\n"
                case code:
                    yield error(int(code), "Whatever")

    def chunks(self, lines: Iterator[bytes]) -> Iterator[bytes]:
        """Cut at random places, possibly within the last line."""
        rest = b""
        for line in lines:
            rest += line
            size = len(rest) if self.well_behaved else self.data.draw(st.integers(0, len(rest)))
            if size:
                yield rest[:size]
                rest = rest[size:]
        if self.choose("whole", "truncated") == "whole" and rest:
            yield rest

    def take(self, events: list[Event[Pod]]) -> None:
        for event in events:
            match event:
                case Synced():
                    changes = self.store.replace(
                        event.objects, event.resource_version, event.unreadable
                    )
                    gone = [change for change in changes if change.new is None]
                    assert changes[: len(gone)] == gone
                    self.replay(changes)
                case Upserted(object=obj, resource_version=version):
                    self.replay([self.store.upsert(obj, version)])
                case Deleted(key=(namespace, name), resource_version=version):
                    change = self.store.delete(namespace, name, version)
                    self.replay([change] if change else [])
                case Bookmarked(resource_version=version):
                    self.store.advance(version)
                case Faulted() | Interrupted():
                    continue
            assert self.state() == self.server.history[self.store.resource_version]
            assert self.replayed == self.state()

    def replay(self, changes: list[Change[Pod]]) -> None:
        for change in changes:
            name = change.object.metadata.name
            before = change.old.metadata.resource_version if change.old else None
            assert self.replayed.get(name) == before
            if change.new is None:
                del self.replayed[name]
            else:
                self.replayed[name] = change.new.metadata.resource_version

    def state(self) -> State:
        objects = {obj.metadata.name: obj.metadata.resource_version for obj in self.store}
        indexed = self.store.by_index("attempt", "0")
        assert {obj.metadata.name for obj in indexed} == set(objects)
        return objects


@examples(300)
@given(st.data())
def test_the_store_holds_the_state_of_the_server(data: st.DataObject) -> None:
    world = World(data)
    for _ in range(data.draw(st.integers(1, 12))):
        world.step()
    world.well_behaved = True
    world.server.mutate("last", delete=False)
    for _ in itertools.takewhile(
        lambda _: world.store.resource_version < world.server.version, range(20)
    ):
        world.step()
    assert world.state() == world.server.history[world.server.version]


@settings(deadline=None)
@given(st.lists(st.integers(min_value=0), max_size=20))
def test_any_chunking_gives_the_same_events(cuts: list[int]) -> None:
    text = b"".join(
        [
            frame("ADDED", pod("a", 5)),
            bookmark(9, end=True),
            b"garbage\n",
            frame("MODIFIED", pod("a", 10)),
            frame("ADDED", pod("large", 11, spec={"x": "y" * 2000})),
            bookmark(12),
            frame("DELETED", pod("a", 13)),
            error(410, "Expired"),
            frame("ADDED", pod("never", 14)),
        ]
    )

    def events(chunks: list[bytes]) -> list[Event[Pod]]:
        watcher = Watcher(PODS, lambda: 0.5, max_line=1000, plain_pages=1)
        watcher.page(page([], 4, token="a long list"), 0)
        watcher.record_open(0)
        found: list[Event[Pod]] = []
        for chunk in chunks:
            found += watcher.receive(chunk, 0)
            if found and isinstance(found[-1], Interrupted):
                break
        return found

    places = sorted({0, len(text), *(cut % len(text) for cut in cuts)})
    whole = events([text])
    assert len(whole) == 7
    assert events([text[start:end] for start, end in itertools.pairwise(places)]) == whole
