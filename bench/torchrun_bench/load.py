"""Jobs one by one in one namespace, and when their child Jobs appear."""

import asyncio
import time

import aiohttp
import msgspec

from torchrun_api.json import JsonObject
from torchrun_bench.bodies import torchrun_job
from torchrun_bench.http import send, watch

MOST_SECONDS = 300
WARM_UP = 5


async def create(
    session: aiohttp.ClientSession, namespace: str, name: str, nodes: int = 1, **spec: JsonObject
) -> None:
    """POST a job. spec: further fields."""
    path = f"/apis/torchrun.ai/v1alpha1/namespaces/{namespace}/torchrunjobs"
    body = msgspec.json.encode(torchrun_job(name, nodes, **spec))
    await send(session, "POST", path, body, "application/json")


class Watched:
    """The monotonic time at which each child Job of a namespace was seen, by name."""

    def __init__(self, session: aiohttp.ClientSession, namespace: str) -> None:
        self._session = session
        self._namespace = namespace
        self._child_times: dict[str, asyncio.Future[float]] = {}
        self._watch_start = asyncio.Event()

    async def follow(self, tasks: asyncio.TaskGroup) -> asyncio.Task[None]:
        """Start the watch. Later objects are seen until the task is cancelled."""
        task = tasks.create_task(self._follow())
        await self._watch_start.wait()
        return task

    async def _follow(self) -> None:
        path = f"/apis/batch/v1/namespaces/{self._namespace}/jobs"
        async for child in watch(self._session, path, self._watch_start.set):
            metadata = child["metadata"]
            assert isinstance(metadata, dict)
            future = self._future(str(metadata["name"]))
            if not future.done():
                future.set_result(time.monotonic())

    async def wait_for_child(self, name: str) -> float:
        """Wait for the child Job of this name. Returns when it was seen."""
        async with asyncio.timeout(MOST_SECONDS):
            return await self._future(name)

    async def run(self, name: str) -> float:
        """Create one job. Returns the seconds until its child Job was seen."""
        started = time.monotonic()
        await create(self._session, self._namespace, name)
        return await self.wait_for_child(name) - started

    def _future(self, name: str) -> asyncio.Future[float]:
        if name not in self._child_times:
            self._child_times[name] = asyncio.get_running_loop().create_future()
        return self._child_times[name]


async def in_turn(
    left: Watched, right: Watched, prefix: str, jobs: int
) -> tuple[list[float], list[float]]:
    """Milliseconds of each job of both sides, after some warm-up jobs."""
    ours: list[float] = []
    floor: list[float] = []
    for number in range(-WARM_UP, jobs):
        first = await left.run(f"{prefix}-{number + WARM_UP}") * 1000
        second = await right.run(f"{prefix}-{number + WARM_UP}") * 1000
        if number >= 0:
            ours.append(first)
            floor.append(second)
    return ours, floor
