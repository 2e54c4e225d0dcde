"""The bare client: a minimal loop with the writes of the controller.

It has no decisions, cache or retries: the minimum of a program in Python.

Usage: python -m torchrun_bench.bare SERVER.json NAMESPACE PLAN.json MODE

NAMESPACE is one namespace, or "" for all of them in the modes "follow" and "list". Writes use the
transport of the controller (`http.Client`).

follow   write for each job that is created from now on, and for each whose gang fails
list     read what a controller lists, split it into lines, and end with the line "synced"
"""

import asyncio
import sys
from pathlib import Path
from typing import TypeAlias

import aiohttp
import msgspec
import uvloop

from torchrun_api.json import JsonObject
from torchrun_api.names import JOB_LABEL
from torchrun_bench.http import APPLY, JSON, Client, Server, events, read, watch

WORKERS = 16
JOBS = "/apis/torchrun.ai/v1alpha1"
# Placeholders of the template, replaced for each job. No name is part of another.
NAME, NAMESPACE, UID = b"template-name.", b"template-namespace.", b"template-uid."
# The lists of the controller, with their selectors. {} is "" or "/namespaces/NAME".
CHILDREN = {"labelSelector": JOB_LABEL}
LISTED: tuple[tuple[str, dict[str, str]], ...] = (
    (JOBS + "{}/torchrunjobs", {}),
    (JOBS + "{}/torchrunqueues", {}),
    ("/api/v1{}/pods", CHILDREN),
    ("/apis/batch/v1{}/jobs", CHILDREN),
    ("/api/v1{}/persistentvolumeclaims", CHILDREN),
    ("/api/v1{}/services", CHILDREN),
)
_END = b'"k8s.io/initial-events-end":"true"'


class Write(msgspec.Struct, frozen=True):
    """One request of the controller, with placeholders for name and UID."""

    path: str
    body: msgspec.Raw
    method: str = "PATCH"


Stages: TypeAlias = list[list[Write]]  # the writes of a stage are sent at once


class Writes(msgspec.Struct, frozen=True):
    """The writes for a new job, and for a job whose first worker has failed."""

    created: Stages = []
    failed: Stages = []


Todo: TypeAlias = "asyncio.Queue[tuple[JsonObject, Stages]]"  # metadata of the job


async def follow(server: Server, namespace: str, writes: Writes) -> None:
    """Watch the jobs of one or all namespaces and write for each, WORKERS at a time."""
    # The API server drops a watcher that reads too slowly, so reading never waits for writing.
    todo: Todo = asyncio.Queue()
    objects: dict[str, JsonObject] = {}
    client = Client(server)
    async with server.session() as session, asyncio.TaskGroup() as tasks:
        for _ in range(WORKERS):
            tasks.create_task(_work(client, todo))
        if writes.failed:
            tasks.create_task(_follow_pods(session, namespace, objects, todo, writes.failed))
        scope = f"/namespaces/{namespace}" if namespace else ""
        jobs = f"{JOBS}{scope}/torchrunjobs"
        async for job in watch(session, jobs, lambda: print("ready", flush=True)):
            metadata = job["metadata"]
            assert isinstance(metadata, dict)
            objects[str(metadata["name"])] = metadata
            todo.put_nowait((metadata, writes.created))


async def _follow_pods(
    session: aiohttp.ClientSession,
    namespace: str,
    objects: dict[str, JsonObject],
    todo: Todo,
    writes: Stages,
) -> None:
    path = f"/api/v1/namespaces/{namespace}/pods"
    async for kind, pod in events(session, path):
        status, metadata = pod.get("status"), pod["metadata"]
        assert isinstance(status, dict)
        assert isinstance(metadata, dict)
        labels = metadata.get("labels")
        if kind == "MODIFIED" and status.get("phase") == "Failed" and isinstance(labels, dict):
            # Only the first failure of a gang counts.
            job = objects.pop(str(labels[JOB_LABEL]), None)
            if job is not None:
                todo.put_nowait((job, writes))


async def read_all(server: Server, namespace: str) -> None:
    """Read the lists of a controller at its start, streamed, without decoding objects."""
    scope = f"/namespaces/{namespace}" if namespace else ""
    async with server.session() as session, asyncio.TaskGroup() as tasks:
        for path, selector in LISTED:
            tasks.create_task(_read_list(session, path.format(scope), selector))
    print("synced", flush=True)


async def _read_list(session: aiohttp.ClientSession, path: str, selector: dict[str, str]) -> None:
    streamed = {
        "watch": "1",
        "sendInitialEvents": "true",
        "resourceVersionMatch": "NotOlderThan",
        "allowWatchBookmarks": "true",
    }
    # A server that has just started ends watches of newly installed kinds.
    for _ in range(100):
        async with session.get(path, params=selector | streamed) as answer:
            rest = b""
            async for chunk in answer.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                if any(_END in line for line in lines[-2:]):
                    return
        await asyncio.sleep(0.1)
    raise RuntimeError(f"the list of {path} breaks off")


async def _work(client: Client, todo: Todo) -> None:
    while True:
        metadata, writes = await todo.get()
        await _write(client, metadata, writes)


async def _write(client: Client, metadata: JsonObject, writes: Stages) -> None:
    for stage in writes:
        if len(stage) == 1:  # without the cost of a task
            await _send(client, metadata, stage[0])
        else:
            await asyncio.gather(*(_send(client, metadata, write) for write in stage))


async def _send(client: Client, metadata: JsonObject, write: Write) -> None:
    name, namespace = str(metadata["name"]), str(metadata["namespace"])
    body = bytes(write.body).replace(UID, str(metadata["uid"]).encode())
    body = body.replace(NAMESPACE, namespace.encode()).replace(NAME, name.encode())
    path = write.path.format(namespace=namespace, name=name)
    await client.send(write.method, path, body, APPLY if write.method == "PATCH" else JSON)


if __name__ == "__main__":
    _server, _plan = read(Path(sys.argv[1])), Path(sys.argv[3]).read_bytes()
    _writes = msgspec.json.decode(_plan, type=Writes)
    match sys.argv[4]:
        case "follow":
            uvloop.run(follow(_server, sys.argv[2], _writes))
        case _:
            uvloop.run(read_all(_server, sys.argv[2]))
