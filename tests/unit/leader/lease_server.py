"""An API server with one Lease, in memory, with injected faults."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from torchrun_controller.client import ApiError, Disconnected, Response

COLLECTION = "/apis/coordination.k8s.io/v1/namespaces/system/leases"
PATH = f"{COLLECTION}/controller"

Fault = Callable[[str], None]


class LeaseServer:
    """The server. `clients` send requests to it."""

    def __init__(self) -> None:
        self.version = 100
        self.object: dict[str, Any] | None = None
        self.log: list[tuple[float, str, str]] = []  # time, client, operation
        # In the order of their creation: a set would make random tests differ between runs.
        self.streams: dict[asyncio.Queue[bytes | Exception | None], None] = {}

    def store(self, obj: dict[str, Any], frame: str) -> dict[str, Any]:
        self.version += 1
        obj["metadata"]["resourceVersion"] = str(self.version)
        self.object = None if frame == "DELETED" else obj
        for stream in self.streams:
            stream.put_nowait(json.dumps({"type": frame, "object": obj}).encode() + b"\n")
        return obj

    def delete(self) -> None:
        assert self.object is not None
        self.store(self.object, "DELETED")

    def edit(self, **spec: Any) -> None:
        """Edit the lease as another writer."""
        assert self.object is not None
        self.store({**self.object, "spec": {**self.object["spec"], **spec}}, "MODIFIED")

    def annotate(self) -> None:
        assert self.object is not None
        self.store({**self.object, "metadata": {**self.object["metadata"]}}, "MODIFIED")

    @property
    def spec(self) -> dict[str, Any]:
        assert self.object is not None
        spec: dict[str, Any] = self.object["spec"]
        return spec


class Client:
    """A transport. `fault` is called with the method before a request; it may raise.

    `lose` drops responses of requests that were processed; `delay` is the time of each request.
    """

    def __init__(self, server: LeaseServer, name: str) -> None:
        self.server = server
        self.name = name
        self.fault: Fault = lambda method: None
        self.lose = False
        self.answer: bytes | None = None
        self.delay = 0.001
        self.watches = 0

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        content_type: str = "application/json",
    ) -> Response:
        await asyncio.sleep(self.delay / 2)
        self.server.log.append((asyncio.get_running_loop().time(), self.name, method))
        self.fault(method)
        answer = self._serve(method, path, body, content_type)
        await asyncio.sleep(self.delay / 2)
        if self.lose:
            raise Disconnected("the connection was reset")
        return Response(200, json.dumps(answer).encode() if self.answer is None else self.answer)

    def _serve(
        self, method: str, path: str, body: bytes | None, content_type: str
    ) -> dict[str, Any]:
        server = self.server
        if method == "POST":
            assert (path, content_type) == (COLLECTION, "application/json")
            if server.object is not None:
                raise ApiError(409, "AlreadyExists", "it exists")
            created = json.loads(body or b"")
            assert created["metadata"] == {"name": "controller", "namespace": "system"}
            return server.store(created, "ADDED")
        assert path == PATH
        if server.object is None:
            raise ApiError(404, "NotFound", "not found")
        if method == "GET":
            return server.object
        assert (method, content_type) == ("PATCH", "application/merge-patch+json")
        patch = json.loads(body or b"")
        metadata = server.object["metadata"]
        if patch["metadata"] != {"resourceVersion": metadata["resourceVersion"]}:
            raise ApiError(409, "Conflict", "it has been modified")
        spec = {**server.object["spec"], **patch["spec"]}
        return server.store({**server.object, "metadata": {**metadata}, "spec": spec}, "MODIFIED")

    @asynccontextmanager
    async def stream(
        self, path: str, *, query: Mapping[str, str], total: float
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        assert path == COLLECTION
        assert query["fieldSelector"] == "metadata.name=controller"
        assert total > float(query["timeoutSeconds"])
        self.watches += 1
        self.fault("WATCH")
        frames: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        if self.server.object is not None:
            frame = json.dumps({"type": "ADDED", "object": self.server.object}).encode() + b"\n"
            frames.put_nowait(frame[:7])
            frames.put_nowait(frame[7:])
        self.server.streams[frames] = None
        try:
            yield _chunks(frames)
        finally:
            self.server.streams.pop(frames, None)


async def _chunks(frames: "asyncio.Queue[bytes | Exception | None]") -> AsyncIterator[bytes]:
    while (frame := await frames.get()) is not None:
        if isinstance(frame, Exception):
            raise frame
        yield frame
