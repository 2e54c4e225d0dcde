"""Pod events per second of one core, from bytes to keys, without a network.

Each side is a separate process with the same input: MODIFIED events of pods with managedFields, in
chunks like from a socket.

controller   informer, watch, store with its indexes, and work queue; keys are taken at once
models       kubernetes_asyncio's Watch.unmarshal_event into V1Pod
dicts        json.loads of each line
floor        splitting the bytes into lines only

Usage: python -m torchrun_bench.churn SIDE EVENTS
"""

import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import msgspec

from torchrun_api.kinds.resources import PODS
from torchrun_bench.frames import FIRST_VERSION, PODS_OF_ALL, chunks
from torchrun_bench.options import Options
from torchrun_bench.processes import PYTHON, compiled_environment
from torchrun_bench.report import Row, row, say
from torchrun_controller.cache.informer import Informer
from torchrun_controller.cache.observe import JOB_INDEX, NODE_INDEX, by_job, by_node
from torchrun_controller.cache.store import Store
from torchrun_controller.client import Response
from torchrun_controller.watch import Watcher
from torchrun_controller.workqueue import AsyncWorkQueue

SLOW = {"models": 50, "dicts": 5}  # one event in this many is measured


class SideResult(msgspec.Struct, frozen=True):
    """The result of one side."""

    events: int
    cpu_seconds: float
    bytes: int


class _Memory:
    """A transport whose watch has `events` frames from memory. Their creation is not measured."""

    def __init__(self, events: int) -> None:
        self._events = events
        self.frame_seconds = 0.0  # CPU seconds for the creation of frames
        self.bytes = 0
        self.end = asyncio.Event()

    async def read_list(self, *arguments: object, **options: object) -> Response:
        """Refuse lists, which are not needed."""
        raise AssertionError(arguments)

    @asynccontextmanager
    async def stream(
        self, path: str, *, query: Mapping[str, str], silence: float = 0.0, total: float
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """An empty list, then the frames, then silence."""
        yield self._chunks()

    async def _chunks(self) -> AsyncIterator[bytes]:
        end = {
            "metadata": {
                "resourceVersion": "1",
                "annotations": {"k8s.io/initial-events-end": "true"},
            }
        }
        yield msgspec.json.encode({"type": "BOOKMARK", "object": end}) + b"\n"
        frames = chunks(0, self._events)
        while True:
            start = time.process_time()
            chunk = next(frames, None)
            self.frame_seconds += time.process_time() - start
            if chunk is None:
                break
            self.bytes += len(chunk)
            yield chunk
            # Like a socket: let other tasks run.
            await asyncio.sleep(0)
        self.end.set()
        await asyncio.Event().wait()


async def _controller(events: int) -> SideResult:
    memory = _Memory(events)
    queue: AsyncWorkQueue[tuple[str, str]] = AsyncWorkQueue(time.monotonic)
    store = Store({JOB_INDEX: by_job, NODE_INDEX: by_node})
    informer = Informer(
        Watcher(PODS, random.random, plain_pages=0),
        memory,  # type: ignore[arg-type] # the part of a Transport that an informer uses
        store,
        lambda change, initial: queue.add(
            (change.object.metadata.namespace, change.object.metadata.labels.torchrun_job)
        ),
    )

    async def take() -> None:
        while True:
            queue.done(await queue.take())

    start = time.process_time()
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(informer.run()), tasks.create_task(take())]
        await memory.end.wait()
        used = time.process_time() - start - memory.frame_seconds
        for task in running:
            task.cancel()
    assert len(store) == min(events, PODS_OF_ALL), f"{len(store)} pods in the store"
    assert store.resource_version == FIRST_VERSION + events
    return SideResult(events, used, memory.bytes)


def _lines(events: int, take: Callable[[bytes], object] | None) -> SideResult:
    """Call `take` with each line of the same bytes."""
    used, size, count, rest = 0.0, 0, 0, b""
    for chunk in chunks(0, events):
        size += len(chunk)
        start = time.process_time()
        *lines, rest = (rest + chunk).split(b"\n")
        if take is not None:
            for line in lines:
                take(line)
        count += len(lines)
        used += time.process_time() - start
    assert count == events, f"{count} lines"
    return SideResult(events, used, size)


async def _models(events: int) -> SideResult:
    from kubernetes_asyncio.watch import Watch

    watch = Watch()  # needs an event loop
    return _lines(events, lambda line: watch.unmarshal_event(line.decode(), "V1Pod"))


def side(name: str, events: int) -> SideResult:
    """Run one side in this process."""
    match name:
        case "controller":
            return asyncio.run(_controller(events))
        case "models":
            return asyncio.run(_models(events))
        case "dicts":
            return _lines(events, json.loads)
        case _:
            return _lines(events, None)


def churn(options: Options) -> list[Row]:
    """All sides in turn, three times."""
    names = "controller", "models", "dicts", "floor"
    rates: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(options.rounds):
        for name in names:
            result = measured(name, max(options.events // SLOW.get(name, 1), 100))
            rates[name].append(result.events / result.cpu_seconds)
            say(
                f"churn: {name} {rates[name][-1]:.0f} events/s"
                f" of {result.bytes // result.events} bytes"
            )
    ours, models, dicts, floor = (sorted(rates[name])[len(rates[name]) // 2] for name in names)
    of = f"{options.events} pod events through watch, store and queue, of one core"
    return [
        row(f"{of}, beside reading and splitting the bytes", "1/s", ours, floor),
        row(f"{of}, beside kubernetes_asyncio's models", "1/s", ours, models),
        row(f"{of}, beside json.loads alone", "1/s", ours, dicts),
    ]


def measured(side: str, events: int) -> SideResult:
    """Run one side in a separate process."""
    command = [PYTHON, "-m", "torchrun_bench.churn", side, str(events)]
    done = subprocess.run(command, env=compiled_environment(), check=True, capture_output=True)
    return msgspec.json.decode(done.stdout, type=SideResult)


if __name__ == "__main__":
    sys.stdout.write(msgspec.json.encode(side(sys.argv[1], int(sys.argv[2]))).decode())
