"""Hostile lines through the real informer, watcher, decoder and store.

A round has its own informer, and one valid object that the API server changes at the end. An
informer that misses this change is stuck.
"""

import asyncio
import json
import random
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from msgspec import Struct

from frames import bookmark, frame
from torchrun_api.json import JsonObject
from torchrun_api.kinds import JOBS, PODS, TORCHRUN_JOBS, Kind
from torchrun_controller.cache.informer import Informer
from torchrun_controller.cache.observe import by_job, by_node, by_parent, by_queue, by_unfenced_node
from torchrun_controller.cache.store import Change, Indexer, Store
from torchrun_controller.client import Response, Transport

GOOD = "good"
PATIENCE = 60.0  # seconds of real time for a round
_NONE: Mapping[str, str] = {}


class UnreadError(Exception):
    """The valid object did not arrive: the informer is stuck or has ended."""


class Sample(Struct, frozen=True):
    """A kind, a valid object of it, and the indexes of the controller."""

    kind: Kind[Any]
    body: JsonObject
    indexers: Mapping[str, Indexer[Any]]

    def named(self, name: str, version: int) -> JsonObject:
        """Another object of the kind."""
        meta = self.body["metadata"]
        assert isinstance(meta, dict)
        uid = f"uid-of-{name}"
        return {
            **self.body,
            "metadata": {**meta, "name": name, "uid": uid, "resourceVersion": str(version)},
        }


class Wire:
    """The server of one informer: sends all lines once, then changes the valid object."""

    def __init__(self, sample: Sample, lines: Sequence[bytes], pages: Sequence[bytes]) -> None:
        self.store: Store[Any] = Store(sample.indexers)
        self._sample = sample
        self._lines = deque(lines)
        self._pages = deque(pages)
        self._seen = asyncio.Event()

    async def play(self, transport: Transport | None = None) -> None:
        """Send all lines, and wait for the changed object. Raises UnreadError, or errors of the informer.

        `transport` serves `chunks` and `page`; without one they are called directly.
        """
        clock = _Clock()
        informer = Informer(
            self._sample.kind,
            transport or _Direct(self),  # type: ignore[arg-type]
            self.store,
            self._changed,
            clock=clock.time,
            sleep=clock.sleep,
            random=random.Random(0).random,
        )
        running = asyncio.create_task(informer.run())
        seeing = asyncio.create_task(self._seen.wait())
        await asyncio.wait((running, seeing), timeout=PATIENCE, return_when="FIRST_COMPLETED")
        done = seeing.done()
        for task in (running, seeing):
            task.cancel()
        ended = await asyncio.gather(running, return_exceptions=True)
        if isinstance(ended[0], Exception):
            raise UnreadError(f"the informer ended: {ended[0]!r}") from ended[0]
        if not done:
            raise UnreadError(f"{len(self._lines)} lines were not asked for")

    def page(self) -> bytes:
        """The response to a list: hostile objects first, then the valid one."""
        if self._pages:
            return self._pages.popleft()
        items = [self._good()]
        return json.dumps({"metadata": {"resourceVersion": "2000000000"}, "items": items}).encode()

    async def chunks(self, query: Mapping[str, str]) -> AsyncIterator[bytes]:
        """A watch, as its bytes arrive."""
        if "sendInitialEvents" in query:
            yield frame("ADDED", self._sample.named(GOOD, 1))
            for chunk in self._next(len(self._lines) % 7):
                yield chunk
            yield bookmark(2, end=True)
        for chunk in self._next(len(self._lines)):
            yield chunk
        yield frame("MODIFIED", self._good())
        await asyncio.Event().wait()

    def _next(self, count: int) -> Iterator[bytes]:
        """The next `count` lines; each is sent once, even if its connection breaks."""
        for _ in range(min(count, len(self._lines))):
            line = self._lines.popleft() + b"\n"
            half = len(line) // 2 if len(self._lines) % 4 == 0 else 0
            yield line[:half] or line
            if half:
                yield line[half:]

    def _good(self) -> JsonObject:
        """The valid object; changed once every line was sent."""
        obj = self._sample.named(GOOD, 2_000_000_001)
        annotations: JsonObject = (
            {} if self._lines else {"torchrun.ai/notification-time": "changed"}
        )
        meta = obj["metadata"]
        assert isinstance(meta, dict)
        return {**obj, "metadata": {**meta, "annotations": annotations}}

    def _changed(self, change: Change[Any], initial: bool) -> None:
        new = change.new
        if new is None or new.metadata.name != GOOD or not new.metadata.annotations:
            return
        annotations = new.metadata.annotations
        if (annotations if isinstance(annotations, str) else str(annotations)).count("changed"):
            self._seen.set()


class _Clock:
    """A clock that sleep() advances without waiting."""

    def __init__(self) -> None:
        self.now = 1000.0

    def time(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        assert 0 <= seconds < 1000, f"a watch that waits {seconds} s is stuck"
        self.now += seconds
        await asyncio.sleep(0)


class _Direct:
    """A transport without a network."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    async def request(
        self, method: str, path: str, *, query: Mapping[str, str] = _NONE, **_: Any
    ) -> Response:
        return Response(200, self._wire.page())

    @asynccontextmanager
    async def stream(
        self, path: str, *, query: Mapping[str, str], **_: Any
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        yield self._wire.chunks(query)


def _meta(**more: Any) -> JsonObject:
    return {
        "namespace": "team",
        "generation": 2,
        "creationTimestamp": "2026-01-02T03:04:05Z",
        "labels": {"torchrun-job-name": "train", "torchrun.ai/attempt": "1"},
        "managedFields": [{"manager": "kubectl", "fieldsV1": {"f:spec": {}}}],
        **more,
    }


_JOB: JsonObject = {
    "metadata": _meta(annotations={"torchrun.ai/workspace-base": "other"}),
    "spec": {
        "jobQueue": "gpu",
        "numNodes": 2,
        "command": ["python", "train.py"],
        "env": [{"name": "A", "value": "b"}],
        "elastic": {"minNodes": 1, "maxNodes": 4},
        "volumes": {"workspace": {"source": "git", "url": "https://git.example/a.git"}},
        "reliability": {"maxRestarts": 3, "rules": [{"exitCodes": [1], "action": "fail"}]},
        "dependsOn": [{"name": "first"}],
        "podTemplate": {"spec": {"containers": [{"name": "trainer", "image": "a:1"}]}},
    },
    "status": {
        "phase": "Running",
        "attempt": 1,
        "workers": {"pending": 0, "ready": 2, "running": 2, "failed": 0, "succeeded": 0},
        "conditions": [{"type": "Running", "status": "True", "reason": "WorkersRunning"}],
        "attempts": [{"number": 0, "reason": "ExitCode", "counted": True}],
        "unfenced": [{"attempt": 0, "index": 1, "node": "n1", "since": "2026-01-02T03:04:05Z"}],
        "progress": {"step": 7, "loss": 0.5, "time": "2026-01-02T03:04:05Z"},
    },
}
_OWNER: JsonObject = {
    "apiVersion": "torchrun.ai/v1alpha1",
    "kind": "TorchrunJob",
    "name": "train",
    "uid": "u",
}
_STATE: JsonObject = {
    "terminated": {"exitCode": 1, "reason": "Error", "finishedAt": "2026-01-02T03:04:05Z"}
}
_POD: JsonObject = {
    "metadata": _meta(
        ownerReferences=[{**_OWNER, "controller": True}],
        annotations={"torchrun.ai/start": "1"},
        deletionTimestamp="2026-01-02T03:04:05Z",
        deletionGracePeriodSeconds=30,
    ),
    "spec": {"nodeName": "n1", "containers": [{"name": "trainer", "image": "a:1"}]},
    "status": {
        "phase": "Failed",
        "conditions": [{"type": "Ready", "status": "False", "lastTransitionTime": None}],
        "containerStatuses": [{"name": "trainer", "state": _STATE, "restartCount": 0}],
    },
}
_CHILD: JsonObject = {
    "metadata": _meta(ownerReferences=[{**_OWNER, "controller": True}]),
    "spec": {"completions": 2, "parallelism": 2, "suspend": False},
    "status": {"active": 2, "conditions": [{"type": "Complete", "status": "True"}]},
}

_by_job: Indexer[Any] = by_job
SAMPLES = (
    Sample(TORCHRUN_JOBS, _JOB, {"queue": by_queue, "parent": by_parent, "node": by_unfenced_node}),
    Sample(PODS, _POD, {"job": _by_job, "node": by_node}),
    Sample(JOBS, _CHILD, {"job": _by_job}),
)
"""What users write, and the children that are most."""
