"""The bare client: a minimal loop that makes the controller's writes and nothing else.

It decides nothing, keeps no cache, retries nothing. What it needs is the floor for a Python program.
Usage: python -m torchrun_bench.bare SERVER.json NAMESPACE PLAN.json
"""

import asyncio
import sys
from pathlib import Path

import aiohttp
import msgspec
import uvloop

from torchrun_bench.http import APPLY, read, send, watch

WORKERS = 16
NAME, UID = b"bench-template", b"bench-template-uid"


class Write(msgspec.Struct, frozen=True):
    """One server-side apply as the controller sends it; name and UID are filled in."""

    path: str
    body: msgspec.Raw


async def main(server: Path, namespace: str, plan: Path) -> None:
    """Watch the jobs of one namespace and write for each, WORKERS at a time."""
    writes = msgspec.json.decode(plan.read_bytes(), type=list[Write])
    slots = asyncio.Semaphore(WORKERS)
    async with read(server).session() as session, asyncio.TaskGroup() as tasks:
        path = f"/apis/torchrun.ai/v1alpha1/namespaces/{namespace}/torchrunjobs"
        print("ready", flush=True)
        async for job in watch(session, path):
            await slots.acquire()
            task = tasks.create_task(_write(session, namespace, job["metadata"], writes))
            task.add_done_callback(lambda _: slots.release())


async def _write(
    session: aiohttp.ClientSession, namespace: str, metadata: dict[str, str], writes: list[Write]
) -> None:
    name, uid = metadata["name"], metadata["uid"]
    for write in writes:
        body = bytes(write.body).replace(UID, uid.encode()).replace(NAME, name.encode())
        path = write.path.format(namespace=namespace, name=name)
        await send(
            session, "PATCH", path, body.replace(b"bench-namespace", namespace.encode()), APPLY
        )


if __name__ == "__main__":
    uvloop.run(main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])))
