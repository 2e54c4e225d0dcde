"""The controller in a cluster full of running jobs: idle, at its start, and with growing size.

One cluster is filled step by step (see `crowd.py`). Each size measures the requested parts, for the
controller and for a bare client with the same lists.
"""

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import msgspec
import uvloop

from torchrun_bench import plans
from torchrun_bench.crowd import Crowd, crowd
from torchrun_bench.hour import hour
from torchrun_bench.load import Watched, create, in_turn
from torchrun_bench.options import Options
from torchrun_bench.processes import (
    BARE_NAMESPACE,
    CONTROLLER_NAMESPACE,
    bare,
    controller,
    free_port,
    requests,
    settled,
    until_ready,
    usage,
    wait_for_word,
)
from torchrun_bench.report import Row, exponent, percentile, row, say

# The factor of n log n from a tenth of a full run (130,000 objects) to the whole, plus a reserve
# for the noise of a shared machine.
MOST_EXPONENT = 1.15


class Cold(msgspec.Struct, frozen=True):
    """One start of an idle controller."""

    synced: float  # seconds from the start of the process
    at_rest: float  # likewise, until it has reconciled everything once
    cpu: float  # seconds
    peak_mib: float
    mib: float
    writes: int
    bare: float  # seconds until the bare client has read the same lists


def parts(names: Sequence[str], options: Options) -> list[Row]:
    """The requested ones of `steady`, `cold`, `hour` and `growth`."""
    rows: list[Row] = []
    colds: dict[int, Cold] = {}
    idle: dict[int, float] = {}
    scales = options.scales if "growth" in names else options.scales[1:]
    with crowd("standing", options.gang, options.spread) as on:
        for jobs in scales:
            _fill(on, jobs, options)
            largest = jobs == max(scales)
            if {"cold", "growth"} & {*names}:
                colds[jobs] = _cold(on, options)
            if "cold" in names and largest:
                rows += _cold_rows(on, colds[jobs], "watches of all namespaces")
                scoped = _cold(on, options, namespaces=on.namespaces)
                rows += _cold_rows(on, scoped, f"watches of {len(on.namespaces)} namespaces")
            if "steady" in names and jobs in options.scales[1:]:
                rows += _steady(on, options)
            if "hour" in names and largest:
                rows += hour(on, options)
            if "growth" in names:  # last, because its jobs never get pods
                idle[jobs] = _idle(on, options)
    if "growth" in names:
        rows += _growth_rows(options.gang, colds, idle)
    return rows


def _fill(on: Crowd, jobs: int, options: Options) -> None:
    """Fill the cluster up to this number of jobs, and let the controller update the queue."""
    on.fill(jobs)
    port = free_port()
    with controller(on.cluster.kubeconfig, port, plant=options.plant) as process:
        until_ready(port)
        settled(process.pid)
        request_counts = requests(port)
    say(
        f"crowd: the first look at {jobs} jobs writes {request_counts.writes} times:"
        f" {request_counts.writes_by_kind()}"
    )


def _cold(on: Crowd, options: Options, namespaces: Sequence[str] = ()) -> Cold:
    """One start with watches of all namespaces, or of each of these."""
    scope = ["--namespaces", ",".join(namespaces)] if namespaces else []
    start = time.monotonic()
    with bare(on.server, "", "list") as process:
        wait_for_word(process, "synced")
        floor = time.monotonic() - start
    port, start = free_port(), time.monotonic()
    with controller(on.cluster.kubeconfig, port, plant=options.plant, options=scope) as process:
        until_ready(port)
        synced = time.monotonic() - start
        used = settled(process.pid)
        at_rest = time.monotonic() - start - 1
        result = Cold(
            synced=synced,
            at_rest=at_rest,
            cpu=used.cpu_seconds,
            peak_mib=used.peak_mib,
            mib=used.mib,
            writes=requests(port).writes,
            bare=floor,
        )
    say(f"cold start with {on.jobs} jobs, {len(namespaces) or 'all'} namespaces: {result}")
    return result


def _cold_rows(on: Crowd, cold: Cold, scope: str) -> list[Row]:
    of = f"cold start, {on.jobs} jobs, {on.jobs * on.gang} pods, {scope}"
    return [
        row(f"{of}: process start to synced", "s", cold.synced, cold.bare),
        row(f"{of}: until all was looked at", "s", cold.at_rest),
        row(f"{of}: CPU", "s", cold.cpu),
        row(f"{of}: peak memory", "MiB", cold.peak_mib, most=320.0),
        row(f"{of}: memory afterwards", "MiB", cold.mib),
        row(f"{of}: writes", "", cold.writes, most=0),
    ]


def _steady(on: Crowd, options: Options) -> list[Row]:
    """Part 3: the idle controller, and a bare client with one idle watch."""
    port = free_port()
    with (
        controller(on.cluster.kubeconfig, port, plant=options.plant) as process,
        bare(on.server, BARE_NAMESPACE) as floor,
    ):
        until_ready(port)
        settled(process.pid)
        before, cpu, bare_cpu = requests(port), *_cpu(process.pid, floor.pid)
        version = uvloop.run(_version(on))
        time.sleep(options.rest)
        cpu, bare_cpu = (
            now - then
            for now, then in zip(_cpu(process.pid, floor.pid), (cpu, bare_cpu), strict=True)
        )
        changed = uvloop.run(_version(on)) - version
        writes = requests(port).since(before).writes
    of = f"{on.jobs} jobs at rest for {options.rest:.0f} s"
    return [
        row(f"{of}: writes", "", writes, most=0),
        row(f"{of}: changes of etcd by anybody", "", changed),
        row(f"{of}: CPU", "s", cpu, bare_cpu or None),
    ]


def _cpu(*pids: int) -> list[float]:
    return [usage(pid).cpu_seconds for pid in pids]


async def _version(on: Crowd) -> int:
    """The revision of etcd; the API server writes its own lease from time to time."""
    path = f"/api/v1/namespaces/{BARE_NAMESPACE}/configmaps"
    async with on.server.session() as session, session.get(path) as answer:
        listed = msgspec.json.decode(await answer.read())
    return int(listed["metadata"]["resourceVersion"])


def _idle(on: Crowd, options: Options) -> float:
    """Median milliseconds of one job in the idle cluster, relative to the bare client."""
    port = free_port()
    with (
        controller(on.cluster.kubeconfig, port, plant=options.plant) as process,
        bare(on.server, BARE_NAMESPACE, plan=plans.same_writes()),
    ):
        until_ready(port)
        settled(process.pid)

        async def measure() -> tuple[list[float], list[float]]:
            async with on.server.session() as session, asyncio.TaskGroup() as tasks:
                left, right = (
                    Watched(session, name) for name in (CONTROLLER_NAMESPACE, BARE_NAMESPACE)
                )
                followers = [await side.follow(tasks) for side in (left, right)]
                latencies = await in_turn(left, right, f"idle-{on.jobs}", options.grown)
                for follower in followers:
                    follower.cancel()
                return latencies

        ours, floor = uvloop.run(measure())
    say(
        f"one job at idle beside {on.jobs}: {percentile(ours, 50):.1f} ms,"
        f" bare {percentile(floor, 50):.1f} ms"
    )
    return percentile(ours, 50)


def resume(options: Options) -> list[Row]:
    """Part 10: from the process start to the child Job of a waiting job, among jobs of one pod."""
    with crowd("resume", 1, options.teams) as on:
        _fill(on, options.scales[1], options)
        return _resume(on, options)


def _resume(on: Crowd, options: Options) -> list[Row]:
    port = free_port()
    with controller(on.cluster.kubeconfig, port, plant=options.plant) as process:
        until_ready(port)
        settled(process.pid)
        writes = requests(port).writes

    def ours(number: int) -> float:
        return _served(
            on, CONTROLLER_NAMESPACE, f"wait-{number}",
            lambda: controller(on.cluster.kubeconfig, free_port(), plant=options.plant),
        )  # fmt: skip

    def floor(number: int) -> float:
        plan = plans.same_writes()
        return _served(
            on, BARE_NAMESPACE, f"wait-{number}",
            lambda: bare(on.server, BARE_NAMESPACE, "resume", plan),
        )  # fmt: skip

    pairs = [(ours(number), floor(number)) for number in range(options.resumes)]
    left, right = zip(*pairs, strict=True)
    say(f"resume with {on.jobs} jobs: {', '.join(f'{seconds:.2f}' for seconds in left)} s")
    of = f"restart with {on.jobs} jobs"
    what = f"{of}, process start to a waiting job's child Job"
    return [
        row(f"{what}, median of {len(left)}", "s", statistics.median(left),
            statistics.median(right), most=0.8),
        row(f"{what}, slowest", "s", max(left), max(right)),
        row(f"{of}: writes", "", writes, most=0),
    ]  # fmt: skip


def _served(
    on: Crowd, namespace: str, name: str, started: Callable[[], AbstractContextManager[object]]
) -> float:
    """Seconds from the start of a process to the child Job of an existing job."""

    async def measure() -> float:
        async with on.server.session() as session, asyncio.TaskGroup() as tasks:
            watched = Watched(session, namespace)
            follower = await watched.follow(tasks)
            await create(session, namespace, name)
            await asyncio.sleep(0.5)
            start = time.monotonic()
            with started():
                child_time = await watched.wait_for_child(name)
                await asyncio.sleep(0.5)
            follower.cancel()
            return child_time - start

    return uvloop.run(measure())


def _growth_rows(gang: int, colds: dict[int, Cold], idle: dict[int, float]) -> list[Row]:
    """Exponents over all sizes. The fixed cost of a start affects the smallest size most."""
    sizes = sorted(colds)
    of = ", ".join(str(size) for size in sizes)
    what = f"growth with {of} jobs of {gang} pods, exponent of"
    rows = [
        row(f"{what} the time of one job at idle", "", exponent(sizes, [idle[s] for s in sizes]),
            most=MOST_EXPONENT),
    ]  # fmt: skip
    for field, name in (
        ("synced", "the time to synced"),
        ("cpu", "the CPU of a cold start"),
        ("peak_mib", "peak memory of a cold start"),
    ):
        costs = [getattr(colds[size], field) for size in sizes]
        slope = exponent(sizes[-2:], costs[-2:])
        bare = [colds[size].bare for size in sizes[-2:]] if field == "synced" else None
        rows.append(
            row(f"{what} {name}, the last step", "", slope,
                exponent(sizes[-2:], bare) if bare else None, most=MOST_EXPONENT)
        )  # fmt: skip
    return rows
