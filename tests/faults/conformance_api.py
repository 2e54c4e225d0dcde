"""Requests to a namespace of the simulated or a real API server."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from bodies import Body
from faults import network
from torchrun_api.kinds.core import Service
from torchrun_api.kinds.resources import Kind
from torchrun_controller.client import ApiError, session
from torchrun_controller.client.apply import APPLY_PATCH

T = TypeVar("T")

MERGE = "application/merge-patch+json"
PATIENCE = 180.0  # seconds; a real controller takes 40 s for some changes on a quiet machine
CONTAINER = {"name": "trainer", "image": "i"}
# It exists, as the pod garbage collector ends the pods of a node that does not.
NODE = "without-kubelet"
# Cheap objects, of which only the metadata is read.
CONFIG_MAPS = Kind("", "v1", "configmaps", "ConfigMap", Service)


class Api:
    """Requests within one namespace, by a real or a simulated transport."""

    def __init__(self, transport: session.Transport | network.Transport, namespace: str) -> None:
        self.transport = transport
        self.namespace = namespace

    async def send(
        self,
        method: str,
        kind: Kind[Any],
        name: str = "",
        body: Body | None = None,
        sub: str = "",
        content: str = MERGE,
        **query: str,
    ) -> Body:
        path = kind.path(self.namespace, name, sub)
        text = None if body is None else json.dumps(body).encode()
        content = content if method == "PATCH" else "application/json"
        answer = await self.transport.request(
            method, path, query=query, body=text, content_type=content
        )
        response: Body = json.loads(answer.body)
        return response

    async def create(self, kind: Kind[Any], name: str, **parts: Any) -> Body:
        return await self.send("POST", kind, body=self.body(kind, name, **parts))

    async def apply(
        self,
        kind: Kind[Any],
        name: str,
        manager: str = "one",
        *,
        sub: str = "",
        force: bool = True,
        **parts: Any,
    ) -> Body:
        query = {"fieldManager": manager} | ({"force": "true"} if force else {})
        body = self.body(kind, name, **parts)
        return await self.send("PATCH", kind, name, body, sub, APPLY_PATCH, **query)

    def body(self, kind: Kind[Any], name: str, metadata: Body | None = None, **parts: Any) -> Body:
        meta = {"name": name, "namespace": self.namespace, **(metadata or {})}
        return {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": meta, **parts}

    @asynccontextmanager
    async def watch(self, kind: Kind[Any], **query: str) -> AsyncIterator[AsyncIterator[Body]]:
        """The frames of a watch."""
        query = {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": "20", **query}
        path = kind.path(self.namespace)
        async with self.transport.stream(path, query=query, total=PATIENCE) as chunks:
            yield _frames(chunks)

    async def until(self, kind: Kind[Any], name: str, holds: Callable[[Body], Any]) -> Body:
        async def look() -> Body | None:
            body = await self.send("GET", kind, name)
            return body if holds(body) else None

        return await eventually(look)


async def _frames(chunks: AsyncIterator[bytes]) -> AsyncIterator[Body]:
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield json.loads(line)


async def eventually(look: Callable[[], Awaitable[T | None]]) -> T:
    async with asyncio.timeout(PATIENCE):
        while not (result := await look()):  # noqa: ASYNC110 nothing tells of a change
            await asyncio.sleep(0.1)
    return result


async def refused(request: Awaitable[Body]) -> ApiError:
    try:
        await request
    except ApiError as error:
        return error
    raise AssertionError("it was not refused")


async def next_change(frames: AsyncIterator[Body]) -> Body:
    """The next frame that is no bookmark, which a real server may send at any time."""
    while (frame := await anext(frames))["type"] == "BOOKMARK":
        pass
    return frame


def version(body: Body) -> str:
    return str(body["metadata"]["resourceVersion"])
