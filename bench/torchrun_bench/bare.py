"""The bare client: a minimal loop that makes the controller's writes and nothing else.

It decides nothing, keeps no cache, retries nothing: the floor for a program in Python.
Usage: python -m torchrun_bench.bare SERVER.json NAMESPACE PLAN.json
"""

import asyncio
import sys
from pathlib import Path

import aiohttp
import msgspec
import uvloop

from torchrun_api.json import JsonObject
from torchrun_bench.http import APPLY, Server, read, send, watch

WORKERS = 16
# Of the template, filled in for each job. No name is part of another.
NAME, NAMESPACE, UID = b"template-name.", b"template-namespace.", b"template-uid."


class Write(msgspec.Struct, frozen=True):
    """One server-side apply as the controller sends it; name and UID are filled in."""

    path: str
    body: msgspec.Raw


async def main(server: Server, namespace: str, writes: list[Write]) -> None:
    """Watch the jobs of one namespace and write for each, WORKERS at a time."""
    # The API server drops a watcher that reads too slowly, so reading never waits for writing.
    jobs: asyncio.Queue[JsonObject] = asyncio.Queue()
    async with server.session() as session, asyncio.TaskGroup() as tasks:
        for _ in range(WORKERS):
            tasks.create_task(_work(session, namespace, jobs, writes))
        path = f"/apis/torchrun.ai/v1alpha1/namespaces/{namespace}/torchrunjobs"
        print("ready", flush=True)
        async for job in watch(session, path):
            jobs.put_nowait(job)


async def _work(
    session: aiohttp.ClientSession,
    namespace: str,
    jobs: asyncio.Queue[JsonObject],
    writes: list[Write],
) -> None:
    while True:
        metadata = (await jobs.get())["metadata"]
        assert isinstance(metadata, dict)
        await _write(session, namespace, metadata, writes)


async def _write(
    session: aiohttp.ClientSession, namespace: str, metadata: JsonObject, writes: list[Write]
) -> None:
    name = str(metadata["name"])
    for write in writes:
        body = bytes(write.body).replace(UID, str(metadata["uid"]).encode())
        body = body.replace(NAMESPACE, namespace.encode()).replace(NAME, name.encode())
        path = write.path.format(namespace=namespace, name=name)
        await send(session, "PATCH", path, body, APPLY)


if __name__ == "__main__":
    template = msgspec.json.decode(Path(sys.argv[3]).read_bytes(), type=list[Write])
    uvloop.run(main(read(Path(sys.argv[1])), sys.argv[2], template))
