"""The controller beside bare clients and JobSet, with gangs of several sizes in many namespaces.

Only one competitor runs at a time, on one API server without a controller manager. In each round
the competitors take turns, and each turn ends with the deletion of its objects in etcd.
"""

import asyncio
import contextlib
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec
import uvloop

from torchrun_bench.api_requests import writes
from torchrun_bench.competitors import (
    APPLY,
    CONTROLLER,
    JOBSET_ALONE,
    JOBSET_SERVICE,
    POST,
    Competitor,
    Site,
    available,
)
from torchrun_bench.control_plane import create_teams, name_of, serving
from torchrun_bench.etcd import Etcd
from torchrun_bench.http import Client
from torchrun_bench.options import Options
from torchrun_bench.report import Row, row, say
from torchrun_bench.turns import Load, Restarted, Sizes, Turn, restart, turn, watched

TARGET_NODES = 2  # the size with targets, and that of the restart
LARGE = 100  # nodes; larger gangs have a smaller burst
_ABOVE = "/registry/{}/bench-team-"
_DELETED = ("torchrun.ai/torchrunjobs", "jobset.x-k8s.io/jobsets", "jobs", "services/specs",
            "events")  # fmt: skip


class Figures(msgspec.Struct):
    """The figures of a run of this part."""

    turns: list[Turn] = []
    restarts: list[Restarted] = []


@contextmanager
def site(part: str, teams: int) -> Iterator[Site]:
    """An API server with the queue in many namespaces."""
    with serving(part) as (cluster, server):
        new_site = Site(name_of(part), cluster, server)
        uvloop.run(create_teams(server, teams))
        yield new_site


def measure(options: Options) -> Figures:
    """Measure all sizes and rounds."""
    figures = Figures()
    with site("shapes", options.teams) as on:
        competitors = available(on)
        for nodes in options.nodes:
            for number in range(options.rounds):
                # Each round starts with another one.
                turned = number % len(competitors)
                for competitor in competitors[turned:] + competitors[:turned]:
                    sizes = Sizes(nodes, options.idle, jobs_of(nodes, options), number)
                    last = number == options.rounds - 1
                    restarts = last and nodes == TARGET_NODES and competitor.restarts
                    _measure(on, competitor, sizes, options.teams, figures, restarts)
    return figures


def jobs_of(nodes: int, options: Options) -> int:
    """The jobs of a burst of gangs of this size."""
    return options.burst if nodes <= LARGE else max(options.burst // 4, 1)


def _measure(
    on: Site, competitor: Competitor, sizes: Sizes, teams: int, figures: Figures, restarts: bool
) -> None:
    async def measured() -> None:
        client = Client(on.server)
        async with watched(on) as children:
            load = Load(client, children, competitor, sizes.nodes, teams)
            with competitor.start(on, sizes.nodes) as process:
                one = await turn(on, load, competitor, process, sizes)
            figures.turns.append(one)
            say(
                f"{sizes.nodes} nodes, round {sizes.round + 1}, {competitor.name}:"
                f" p50 {one.p50:.1f} ms, p99 {one.p99:.1f} ms, {one.rate:.0f}/s,"
                f" {one.cpu_ms:.2f} ms CPU a job, {one.peak_mib:.0f} MiB"
            )
            if restarts:
                figures.restarts.append(await restart(on, load, competitor, sizes.nodes))
                say(f"restart: {figures.restarts[-1]}")
        client.close()

    uvloop.run(measured())
    wipe(on)


def wipe(on: Site) -> None:
    """Delete what the turn has created. It takes seconds by requests, and leaves finalizers."""
    etcd = Etcd(on.name)
    with contextlib.closing(etcd):
        for resource in _DELETED:
            etcd.delete(_ABOVE.format(resource))
    uvloop.run(_until_empty(on))


async def _until_empty(on: Site) -> None:
    """Wait until the API server does not list the deleted Jobs any more."""
    client = Client(on.server)
    async with asyncio.timeout(60):
        for path in ("/apis/batch/v1/jobs", "/apis/torchrun.ai/v1alpha1/torchrunjobs"):
            query = "?resourceVersion=0&limit=1"
            for _ in range(1000):
                if not msgspec.json.decode(await client.send("GET", path + query))["items"]:
                    break
                await asyncio.sleep(0.05)
    client.close()


def ratio(turns: Sequence[Turn], field: str, nodes: int, other: Competitor) -> float | None:
    """The median of the ratios of the controller and another one, each within one round."""
    values = {
        (each.competitor, each.round): float(getattr(each, field))
        for each in turns
        if each.nodes == nodes
    }
    ratios = [
        value / values[other.name, number]
        for (name, number), value in values.items()
        if name == CONTROLLER.name and values.get((other.name, number))
    ]
    return statistics.median(ratios) if ratios else None


def median(turns: Sequence[Turn], field: str, nodes: int, one: Competitor) -> float | None:
    """The median of a competitor's figure over the rounds."""
    values = [
        float(getattr(each, field))
        for each in turns
        if each.nodes == nodes and each.competitor == one.name
    ]
    return statistics.median(values) if values else None


# Field, what it is, its unit, the other competitor, and the bound of the ratio.
TARGETS: tuple[tuple[str, str, str, Competitor, tuple[str, float]], ...] = (
    ("p50", "idle, created to child Job seen, p50", "ms", POST, ("<=", 1.4)),
    ("p50", "idle, created to child Job seen, p50", "ms", JOBSET_SERVICE, ("<=", 1.0)),
    ("rate", "burst, child Jobs a second", "1/s", APPLY, (">=", 0.9)),
    ("rate", "burst, child Jobs a second", "1/s", POST, (">=", 0.4)),
    ("rate", "burst, child Jobs a second", "1/s", JOBSET_ALONE, (">=", 2.5)),
    ("cpu_ms", "CPU a job until it is at rest", "ms", JOBSET_ALONE, ("<=", 0.6)),
)


def rows(figures: Figures) -> list[Row]:
    """The figures that have targets."""
    turns, nodes, result = figures.turns, TARGET_NODES, []
    for field, what, unit, other, bound in TARGETS:
        ours, its = (median(turns, field, nodes, one) for one in (CONTROLLER, other))
        if ours is not None and its is not None:
            of = ratio(turns, field, nodes, other)
            what = f"{nodes} nodes, {what}, beside {other.name}"
            result.append(row(what, unit, ours, its, ratio=bound, of=of))
    for field, what, unit, most in (
        ("cpu_ms", "CPU a job until it is at rest", "ms", 2.0),
        ("peak_mib", "peak memory", "MiB", 75.0),
    ):
        ours = median(turns, field, nodes, CONTROLLER)
        if ours is not None:
            result.append(row(f"{nodes} nodes, {what}", unit, ours, most=most))
    return result + _restart_rows(figures.restarts)


def _restart_rows(restarts: Sequence[Restarted]) -> list[Row]:
    by_name = {each.competitor: each for each in restarts}
    ours = by_name.get(CONTROLLER.name)
    if ours is None:
        return []
    of = f"restart with {ours.jobs} jobs"
    result = [row(f"{of}: writes", "", ours.writes, most=0)]
    if other := by_name.get(JOBSET_SERVICE.name):
        beside = f"beside {other.competitor}"
        result += [
            row(f"{of}: ready, {beside}", "s", ours.ready, other.ready),
            row(f"{of}: first action, {beside}", "s", ours.first_action, other.first_action,
                ratio=("<=", 1.0)),
        ]  # fmt: skip
    return result


def requests_of(one: Turn) -> str:
    """Requests and writes for each job, as a line of text."""
    kinds = ", ".join(f"{n:.2f} {kind}" for kind, n in one.requests.items() if n >= 0.005)
    return f"{one.competitor}: {writes(one.requests):.2f} writes a job ({kinds})"
