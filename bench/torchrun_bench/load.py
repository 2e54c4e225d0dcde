"""The load: creates jobs and sees when their child Jobs appear."""

import asyncio
import time

import aiohttp
import msgspec

from torchrun_bench.http import send, watch

CREATORS = 32


class Watched:
    """When each child Job of one namespace was seen, by name, in seconds of the monotonic clock."""

    def __init__(self, session: aiohttp.ClientSession, namespace: str) -> None:
        self._session = session
        self._namespace = namespace
        self._seen: dict[str, asyncio.Future[float]] = {}

    async def follow(self) -> None:
        """Run until cancelled."""
        async for job in watch(self._session, f"/apis/batch/v1/namespaces/{self._namespace}/jobs"):
            metadata = job["metadata"]
            assert isinstance(metadata, dict)
            future = self._future(str(metadata["name"]))
            if not future.done():
                future.set_result(time.monotonic())

    def _future(self, name: str) -> asyncio.Future[float]:
        if name not in self._seen:
            self._seen[name] = asyncio.get_running_loop().create_future()
        return self._seen[name]

    async def run(self, name: str) -> float:
        """Create one job; seconds until its child Job was seen."""
        started = time.monotonic()
        await self._create(name)
        async with asyncio.timeout(60):
            return await self._future(name) - started

    async def burst(self, prefix: str, jobs: int) -> float:
        """Create many jobs at once; seconds until the last child Job was seen."""
        names = [f"{prefix}-{number}" for number in range(jobs)]
        slots = asyncio.Semaphore(CREATORS)

        async def create(name: str) -> None:
            async with slots:
                await self._create(name)

        started = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for name in names:
                tasks.create_task(create(name))
        async with asyncio.timeout(600):
            ends = [await self._future(name) for name in names]
        return max(ends) - started

    async def _create(self, name: str) -> None:
        body = {
            "apiVersion": "torchrun.ai/v1alpha1",
            "kind": "TorchrunJob",
            "metadata": {"name": name},
            "spec": {"jobQueue": "bench", "numNodes": 1, "command": "python train.py"},
        }
        path = f"/apis/torchrun.ai/v1alpha1/namespaces/{self._namespace}/torchrunjobs"
        await send(self._session, "POST", path, msgspec.json.encode(body), "application/json")
