"""The informer against a real API server that restarts, is compacted and loses connections.

Each test breaks its control plane, so this module starts two: one with default flags, and one that
behaves like an old release (no streamed lists, no watch cache).
"""

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from informing import Observed, running
from torchrun_api.json import JsonObject
from torchrun_api.kinds.core import Service
from torchrun_api.kinds.resources import Kind
from torchrun_cluster import LocalCluster, Size
from torchrun_controller.cache.informer import Informer
from torchrun_controller.cache.store import Change, Store
from torchrun_controller.client import Connection, Response, Transport
from torchrun_controller.watch import Timings, Watcher

# Cheap objects that nobody else touches; of a Service, too, only the metadata is read.
CONFIG_MAPS = Kind("", "v1", "configmaps", "ConfigMap", Service)
SELECTOR = "torchrun-job-name=informed"
PATIENCE = 180.0
OLD = ["--feature-gates=WatchList=false", "--watch-cache=false"]


@pytest.fixture(scope="module", params=["as it comes", "old"])
def server(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    name = f"test-informer-{len(request.param)}-{os.getpid()}"
    flags = {"kube-apiserver": OLD} if request.param == "old" else {}
    with LocalCluster(name=name, size=Size.CONTROL_PLANE, extra_args=flags) as running:
        yield running


class Recorder:
    """An informer, the changes that it reports, and the calls of its observer."""

    def __init__(self) -> None:
        self.changes: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        self.observed = Observed()
        self.informer: Informer[Service]

    def on_change(self, change: Change[Service], initial: bool) -> None:
        verb = "delete" if change.new is None else "add" if change.old is None else "update"
        self.changes.put_nowait((verb, change.object.metadata.name))

    async def next(self) -> tuple[str, str]:
        async with asyncio.timeout(PATIENCE):
            return await self.changes.get()

    def count(self, *what: object) -> int:
        return sum(call[: len(what)] == what for call in self.observed.calls)


@pytest.fixture(autouse=True)
async def empty_namespace(server: LocalCluster) -> None:
    """Delete the objects of the previous test."""
    async with sessions(server) as (_, write):
        await write.request(
            "DELETE", CONFIG_MAPS.path("default"), query={"labelSelector": "torchrun-job-name"}
        )


@asynccontextmanager
async def sessions(server: LocalCluster) -> AsyncIterator[tuple[Transport, Transport]]:
    """One to watch with, one to write with."""
    connection = await Connection.load(str(server.kubeconfig))
    async with connection.session("watch") as watch, connection.session("write") as write:
        yield watch, write


@asynccontextmanager
async def informed(transport: Transport) -> AsyncIterator[Recorder]:
    recorder = Recorder()
    recorder.informer = Informer(
        Watcher(
            CONFIG_MAPS,
            random.random,
            label_selector=SELECTOR,
            timings=Timings(backoff=0.1),
        ),
        transport,
        Store(),
        recorder.on_change,
        namespace="default",
        observer=recorder.observed,
    )
    async with running(recorder.informer):
        async with asyncio.timeout(PATIENCE):
            await recorder.informer.synced.wait()
        yield recorder


class BetweenPages(Transport):
    """Calls `happen` after the first page of a list."""

    def __init__(self, transport: Transport, happen: Callable[[], Awaitable[None]]) -> None:
        self.__dict__.update(transport.__dict__)
        self.happen = happen
        self.asked: list[tuple[str, bool]] = []

    async def read_list(self, path: str, **options: Any) -> Response:
        query = options["query"]
        self.asked.append((query.get("limit", ""), "continue" in query))
        if "continue" in query:
            await self.happen()
        return await super().read_list(path, **options)


class Cable:
    """A TCP relay to the API server that a test can cut and restore."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.whole = True
        self.ends: set[asyncio.StreamWriter] = set()
        self.relays: set[asyncio.Task[None]] = set()
        self.connection: Connection

    async def relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.relays.add(task)
        self.ends.add(writer)
        if not self.whole:
            writer.close()
            return
        upstream, down = await asyncio.open_connection("127.0.0.1", self.port)
        self.ends.add(down)
        await asyncio.gather(pump(reader, down), pump(upstream, writer))

    def cut(self) -> None:
        self.whole = False
        for end in self.ends:
            end.close()

    def restore(self) -> None:
        self.whole = True


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while chunk := await reader.read(65536):
            writer.write(chunk)
            await writer.drain()
    writer.close()


@asynccontextmanager
async def cable(server: LocalCluster) -> AsyncIterator[Cable]:
    line = Cable(int(server.server.rpartition(":")[2]))
    relay = await asyncio.start_server(line.relay, "127.0.0.1", 0)
    direct = await Connection.load(str(server.kubeconfig))
    here = f"https://127.0.0.1:{relay.sockets[0].getsockname()[1]}"
    endpoint = msgspec.structs.replace(direct.endpoint, server=here)
    line.connection = Connection(endpoint, direct._credentials)
    async with relay:
        yield line
        line.cut()
        await asyncio.gather(*line.relays)


async def create(transport: Transport, name: str, job: str = "informed") -> int:
    metadata: JsonObject = {"name": name, "labels": {"torchrun-job-name": job}}
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}
    path = CONFIG_MAPS.path("default")
    created = await transport.request("POST", path, body=msgspec.json.encode(body))
    return int(msgspec.json.decode(created.body, type=Service).metadata.resource_version)


async def label(transport: Transport, name: str, **labels: str) -> None:
    await transport.request(
        "PATCH",
        CONFIG_MAPS.path("default", name),
        body=msgspec.json.encode({"metadata": {"labels": labels}}),
        content_type="application/merge-patch+json",
    )


async def delete(transport: Transport, name: str) -> None:
    await transport.request("DELETE", CONFIG_MAPS.path("default", name))


async def test_list_and_watch(server: LocalCluster) -> None:
    async with sessions(server) as (watch, write):
        await create(write, "before")
        await create(write, "foreign", job="other")
        async with informed(watch) as recorder:
            assert await recorder.next() == ("add", "before")
            await create(write, "after")
            assert await recorder.next() == ("add", "after")
            await label(write, "after", **{"torchrun.ai/attempt": "1"})
            assert await recorder.next() == ("update", "after")
            after = recorder.informer.store.get("default", "after")
            assert after is not None
            assert after.metadata.labels.attempt == "1"
            await label(write, "after", **{"torchrun-job-name": "other"})
            assert await recorder.next() == ("delete", "after")
            await delete(write, "before")
            assert await recorder.next() == ("delete", "before")
            assert len(recorder.informer.store) == 0
            assert recorder.count("interrupted") == 0


async def test_the_informer_reads_its_own_writes(server: LocalCluster) -> None:
    async with sessions(server) as (watch, write), informed(watch) as recorder:
        version = await create(write, "written")
        assert await recorder.informer.wait_for(version, PATIENCE)
        assert recorder.informer.store.get("default", "written") is not None


async def test_restart_of_the_server(server: LocalCluster) -> None:
    async with sessions(server) as (watch, write):
        await create(write, "before")
        async with informed(watch) as recorder:
            assert await recorder.next() == ("add", "before")
            await asyncio.to_thread(server.restart, "kube-apiserver")
            await create(write, "after")
            while (change := await recorder.next()) != ("add", "after"):
                assert change == ("update", "before")  # a relist is allowed, a loss is not
            assert {obj.metadata.name for obj in recorder.informer.store} == {"before", "after"}


async def test_compaction_is_exactly_one_relist(server: LocalCluster) -> None:
    async with sessions(server) as (_, write), cable(server) as line:
        for name in ("stays", "deleted"):
            await create(write, name)
        async with line.connection.session("watch") as watch, informed(watch) as recorder:
            assert {await recorder.next(), await recorder.next()} == {
                ("add", "stays"),
                ("add", "deleted"),
            }
            await recorder.informer.synced.wait()
            await create(write, "seen")  # a watch without any event is not resumed
            assert await recorder.next() == ("add", "seen")
            line.cut()
            await delete(write, "deleted")
            await create(write, "foreign-to-it", job="other")
            await asyncio.to_thread(server.compact_etcd)
            await asyncio.to_thread(server.restart, "kube-apiserver")  # forgets its watch cache
            line.restore()
            assert [await recorder.next() for _ in range(3)] == [
                ("delete", "deleted"),
                ("update", "seen"),
                ("update", "stays"),
            ]
            await create(write, "after")
            assert await recorder.next() == ("add", "after")
            assert recorder.count("synced") == 2
            assert recorder.count("interrupted", "configmaps", "Expired", True) == 1


async def test_a_list_of_two_pages(server: LocalCluster) -> None:
    async with sessions(server) as (watch, write):
        for start in range(0, 700, 50):
            await asyncio.gather(*(create(write, f"many-{start + n}") for n in range(50)))

        async def compact() -> None:
            await create(write, "foreign-to-pages", job="other")
            await asyncio.to_thread(server.compact_etcd)

        between = BetweenPages(watch, compact)
        async with informed(between) as recorder:
            assert len(recorder.informer.store) == 700
            assert recorder.count("interrupted") == 0
        # A new server serves the second page from memory. On an old one the page has expired, and
        # the informer asks for the whole list.
        pages = [("500", False), ("500", True)]
        assert between.asked in (pages, [*pages, ("", False)])
