"""How fast jobs start: one at idle, and many at once.

The controller and the bare clients take turns on one API server. The time is from the creation of
the TorchrunJob until a watch of the bench sees its child Job.
"""

import asyncio
import contextlib
import statistics
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

import msgspec
import uvloop

from torchrun_bench import plans
from torchrun_bench.control_plane import serving
from torchrun_bench.http import Server
from torchrun_bench.load import Watched
from torchrun_bench.options import Options
from torchrun_bench.processes import (
    BARE_NAMESPACE,
    CONTROLLER_NAMESPACE,
    POST_NAMESPACE,
    bare,
    controller,
    free_port,
    ready,
    requests,
    settled,
    usage,
)
from torchrun_bench.report import Row, percentile, row, say

WARM_UP = 5


class Sides(msgspec.Struct, frozen=True):
    """The compared processes."""

    server: Server
    controller: int  # process
    port: int
    bare: int
    post: int


class Follow(msgspec.Struct, frozen=True):
    """The watch of the namespace of each side."""

    controller: Watched
    bare: Watched
    post: Watched


@contextlib.contextmanager
def sides(part: str, options: Options) -> Iterator[Sides]:
    """Run the controller and the two bare clients on one API server."""
    with serving(part) as (cluster, server):
        port = free_port()
        with (
            controller(cluster.kubeconfig, port, plant=options.plant) as process,
            bare(server, BARE_NAMESPACE, plan=plans.same_writes()) as floor,
            bare(server, POST_NAMESPACE, plan=plans.only_the_job()) as post,
        ):
            yield Sides(server, process.pid, port, floor.pid, post.pid)


@asynccontextmanager
async def following(on: Sides) -> AsyncIterator[Follow]:
    """Watch the namespaces of all sides, once the controller is ready."""
    async with on.server.session() as session, asyncio.TaskGroup() as tasks:
        names = CONTROLLER_NAMESPACE, BARE_NAMESPACE, POST_NAMESPACE
        watched = [Watched(session, name) for name in names]
        followers = [await side.follow(tasks) for side in watched]
        await ready(on.port)
        yield Follow(*watched)
        for follower in followers:
            follower.cancel()


def run(on: Sides, measure: Callable[[Follow], Awaitable[list[Row]]]) -> list[Row]:
    """Measure with the event loop of the load."""

    async def measured() -> list[Row]:
        async with following(on) as follow:
            return await measure(follow)

    return uvloop.run(measured())


def latency(options: Options) -> list[Row]:
    """Part 1: one job at a time."""
    with sides("latency", options) as on:
        return run(on, lambda follow: _one_by_one(follow, options.jobs))


async def _one_by_one(follow: Follow, jobs: int) -> list[Row]:
    ours, floor = await in_turn(follow.controller, follow.bare, "one", jobs)
    rows = []
    for percent, bound in ((50, 1.3), (99, 2.0)):
        what = f"one job at idle, CR created to child Job seen, p{percent} of {jobs}"
        left, right = percentile(ours, percent), percentile(floor, percent)
        rows.append(row(what, "ms", left, right, ratio=("<=", bound)))
    return rows


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


class Burst(msgspec.Struct, frozen=True):
    """One round of one side."""

    rate: float  # child Jobs a second
    cpu_ms: float  # of the process of the side, for each job


def burst(options: Options) -> list[Row]:
    """Part 2: many jobs at once, the sides in turn."""
    with sides("burst", options) as on:
        return run(on, lambda follow: _bursts(on, follow, options))


async def _bursts(on: Sides, follow: Follow, options: Options) -> list[Row]:
    jobs = options.burst
    turns = (
        (on.controller, follow.controller),
        (on.bare, follow.bare),
        (on.post, follow.post),
    )
    rounds: tuple[list[Burst], ...] = ([], [], [])
    before = requests(on.port)
    peak = 0.0
    for number in range(options.rounds):
        for (pid, watched), kept in zip(turns, rounds, strict=True):
            kept.append(await one_burst(watched, pid, f"burst-{number}", jobs))
        peak = peak or usage(on.controller).peak_mib
        rates = ", ".join(f"{kept[-1].rate:.0f}/s" for kept in rounds)
        say(f"burst: round {number + 1} of {options.rounds}: {rates}")
    made = requests(on.port).since(before)
    for kind, count in sorted(made.by_kind.items()):
        say(f"burst: {count / jobs / options.rounds:.2f} requests a job: {' '.join(kind)}")
    rate, cpu = (
        [statistics.median(getattr(one, field) for one in kept) for kept in rounds]
        for field in ("rate", "cpu_ms")
    )
    many, of = jobs * options.rounds, f"median of {options.rounds}"
    return [
        row(
            f"burst of {jobs}, child Jobs a second, beside the same writes, {of}",
            *("1/s", rate[0], rate[1]),
            ratio=(">=", 0.8),
        ),
        row("the same beside a POST of the Job alone", "1/s", rate[0], rate[2], ratio=(">=", 0.3)),
        row(f"CPU for a job of the burst, {of}", "ms", cpu[0], cpu[1], most=1.5),
        row("CPU beside a POST of the Job alone", "ms", cpu[0], cpu[2]),
        row("requests for a job of the burst, events too", "", made.all / many, 2.0),
        row("writes for a job of the burst, without events", "", made.writes / many, 2.0, most=3.0),
        row(f"peak memory at {jobs} jobs", "MiB", peak, usage(on.bare).peak_mib, most=95.0),
    ]


async def one_burst(watched: Watched, pid: int, prefix: str, jobs: int) -> Burst:
    """Create the jobs, and measure CPU time until the side is idle again."""
    before = usage(pid).cpu_seconds
    seconds = await watched.burst(prefix, jobs)
    after = await asyncio.to_thread(settled, pid)
    return Burst(jobs / seconds, (after.cpu_seconds - before) / jobs * 1000)
