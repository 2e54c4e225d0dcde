"""One turn of a competitor: jobs one by one, jobs at once, and a restart."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import aiohttp
import msgspec

from torchrun_bench import bodies
from torchrun_bench.api_requests import counted, server_cpu, since, writes
from torchrun_bench.competitors import Competitor, Running, Site
from torchrun_bench.http import Client
from torchrun_bench.processes import settled, usage
from torchrun_bench.report import percentile

CREATORS = 32
INTERVAL = 0.05  # seconds between two jobs at idle
WARM_UP = 20
MOST_SECONDS = 600.0  # for a burst of any size


class Turn(msgspec.Struct, frozen=True):
    """Figures of one competitor with gangs of one size in one round."""

    competitor: str
    nodes: int
    round: int
    jobs: int  # of the burst
    p50: float  # ms from the creation of the user's object to its child Job, at idle
    p99: float
    rate: float  # child Jobs a second in the burst
    cpu_ms: float  # of its process, for each job of the burst, until it is at rest
    api_cpu_ms: float  # of the API server, for each job
    etcd_cpu_ms: float
    peak_mib: float
    requests: dict[str, float]  # for each job of the burst, by verb and resource


class Restarted(msgspec.Struct, frozen=True):
    """Figures of a start beside existing jobs."""

    competitor: str
    jobs: int
    ready: float  # seconds from the start of the process
    first_action: float  # seconds from another start to the child Job of a job that waits
    cpu: float  # seconds until it is at rest
    writes: float  # without events
    requests: dict[str, float]  # by verb and resource


class _Metadata(msgspec.Struct, rename="camel"):
    name: str = ""
    resource_version: str = ""


class _Object(msgspec.Struct):
    metadata: _Metadata


class _Event(msgspec.Struct):
    type: str
    object: _Object


_EVENT = msgspec.json.Decoder(_Event)
_LIST = msgspec.json.Decoder(_Object)


class Children:
    """The monotonic times at which a watch of all namespaces saw the child Jobs, by name."""

    def __init__(self) -> None:
        self._child_times: dict[str, asyncio.Future[float]] = {}

    def note(self, name: str, when: float) -> None:
        """Keep when a Job was seen first."""
        future = self._future(name)
        if not future.done():
            future.set_result(when)

    async def wait_for_child(self, name: str) -> float:
        """Wait for the Job of this name. Returns when it was seen."""
        async with asyncio.timeout(MOST_SECONDS):
            return await self._future(name)

    def _future(self, name: str) -> asyncio.Future[float]:
        if name not in self._child_times:
            self._child_times[name] = asyncio.get_running_loop().create_future()
        return self._child_times[name]


@asynccontextmanager
async def watched(site: Site) -> AsyncIterator[Children]:
    """Watch the Jobs of all namespaces until the end of the block."""
    children, started = Children(), asyncio.Event()
    async with site.server.session() as session, asyncio.TaskGroup() as tasks:
        follower = tasks.create_task(_follow(session, children, started))
        await started.wait()
        yield children
        follower.cancel()


async def _follow(
    session: aiohttp.ClientSession, children: Children, started: asyncio.Event
) -> None:
    path = "/apis/batch/v1/jobs"
    async with session.get(path, params={"limit": "1"}) as answer:
        version = _LIST.decode(await answer.read()).metadata.resource_version
    query = {"watch": "1", "resourceVersion": version, "timeoutSeconds": "3600"}
    async with session.get(path, params=query) as answer:
        started.set()
        rest = b""
        async for chunk in answer.content.iter_any():
            *lines, rest = (rest + chunk).split(b"\n")
            now = time.monotonic()
            for line in lines:
                event = _EVENT.decode(line)
                if event.type == "ADDED":
                    children.note(event.object.metadata.name, now)
    raise RuntimeError("the watch of the Jobs ended")


class Load:
    """Creates the objects of users in many namespaces, and measures their child Jobs."""

    def __init__(
        self, client: Client, children: Children, competitor: Competitor, nodes: int, teams: int
    ) -> None:
        self._client = client
        self._children = children
        self._competitor = competitor
        self._nodes = nodes
        self._teams = teams
        self.created = 0

    async def create(self, name: str) -> None:
        """POST one object. The namespaces take turns."""
        path = self._competitor.collection.format(bodies.team(self.created % self._teams))
        self.created += 1
        body = msgspec.json.encode(self._competitor.body(name, self._nodes))
        await self._client.send("POST", path, body)

    async def run(self, name: str) -> float:
        """Create one object. Returns the seconds until its child Job was seen."""
        started = time.monotonic()
        await self.create(name)
        return await self.wait_for_child(name) - started

    async def wait_for_child(self, name: str) -> float:
        """Wait for the child Job of an object. Returns when it was seen."""
        return await self._children.wait_for_child(self._competitor.child.format(name))

    async def one_by_one(self, prefix: str, jobs: int) -> list[float]:
        """Create an object every INTERVAL seconds. Returns the seconds of each."""
        tasks = []
        async with asyncio.TaskGroup() as group:
            for number in range(jobs):
                tasks.append(group.create_task(self.run(f"{prefix}-{number}")))
                await asyncio.sleep(INTERVAL)
        return [task.result() for task in tasks]

    async def burst(self, prefix: str, jobs: int) -> float:
        """Create many objects by CREATORS clients. Returns the seconds to the last child Job."""
        numbers = iter(range(jobs))

        async def creator() -> None:
            for number in numbers:
                await self.create(f"{prefix}-{number}")

        started = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for _ in range(CREATORS):
                group.create_task(creator())
        return (
            max([await self.wait_for_child(f"{prefix}-{number}") for number in range(jobs)])
            - started
        )

    def creations(self, before: int = 0) -> Mapping[str, int]:
        """The requests of the load, as `api_requests` counts them."""
        return {f"post {self._competitor.resource}": self.created - before}


class Sizes(msgspec.Struct, frozen=True):
    """What a turn measures: nodes of each job, jobs one by one, and jobs of the burst."""

    nodes: int
    idle: int
    jobs: int
    round: int = 0


async def turn(
    site: Site, load: Load, competitor: Competitor, process: Running, sizes: Sizes
) -> Turn:
    """Measure a started competitor."""
    client, jobs = Client(site.server), sizes.jobs
    await asyncio.to_thread(process.until_ready)
    await load.burst("warm", WARM_UP)
    await asyncio.to_thread(settled, process.pid)
    idle = await load.one_by_one("idle", sizes.idle)
    await asyncio.to_thread(settled, process.pid)
    before, created = await counted(client), load.created
    cpu, server = usage(process.pid).cpu_seconds, server_cpu(site)
    seconds = await load.burst("burst", jobs)
    used = await asyncio.to_thread(settled, process.pid, still=2.0)
    server = server_cpu(site).since(server)
    requests = since(await counted(client), before, load.creations(created))
    client.close()
    return Turn(
        competitor=competitor.name,
        nodes=sizes.nodes,
        round=sizes.round,
        jobs=jobs,
        p50=percentile(idle, 50) * 1000,
        p99=percentile(idle, 99) * 1000,
        rate=jobs / seconds,
        cpu_ms=(used.cpu_seconds - cpu) / jobs * 1000,
        api_cpu_ms=server.api / jobs * 1000,
        etcd_cpu_ms=server.etcd / jobs * 1000,
        peak_mib=used.peak_mib,
        requests={kind: n / jobs for kind, n in requests.items()},
    )


async def restart(site: Site, load: Load, competitor: Competitor, nodes: int) -> Restarted:
    """Start a competitor beside the jobs of a turn, twice.

    The first start has nothing to do. At the second, a job waits for its child Job.
    """
    client, jobs = Client(site.server), load.created
    before, start = await counted(client), time.monotonic()
    with competitor.start(site, nodes) as process:
        await asyncio.to_thread(process.until_ready)
        ready = time.monotonic() - start
        used = await asyncio.to_thread(settled, process.pid)
        requests = since(await counted(client), before, {})
    client.close()
    await load.create(name := f"late-{jobs}")
    start = time.monotonic()
    with competitor.start(site, nodes):
        first = await load.wait_for_child(name) - start
    return Restarted(
        competitor=competitor.name,
        jobs=jobs,
        ready=ready,
        first_action=first,
        cpu=used.cpu_seconds,
        writes=writes(requests),
        requests=requests,
    )
