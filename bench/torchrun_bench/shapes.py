"""The controller beside bare clients and JobSet, with gangs of several sizes in many namespaces.

Only one competitor runs at a time, on one API server without a controller manager. In each round
the competitors take turns, and each turn ends with the deletion of its objects in etcd.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec
import uvloop

from torchrun_bench.api_requests import writes
from torchrun_bench.competitors import (
    COMPETITORS,
    CONTROLLER,
    JOBSET_SERVICE,
    Competitor,
    Site,
    available,
)
from torchrun_bench.control_plane import create_teams, name_of, serving
from torchrun_bench.etcd import Etcd
from torchrun_bench.http import Client
from torchrun_bench.options import Options
from torchrun_bench.report import Row, markdown, row, say, spread
from torchrun_bench.turns import Load, Restarted, Sizes, Turn, restart, turn, watched

RESTARTED_NODES = 2  # the size of gangs of the restart
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
                    restarts = last and nodes == RESTARTED_NODES and competitor.restarts
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


COLUMNS: tuple[tuple[str, Callable[[Turn], float]], ...] = (
    ("idle p50, ms", lambda turn: turn.p50),
    ("idle p99, ms", lambda turn: turn.p99),
    ("child Jobs a second", lambda turn: turn.rate),
    ("CPU a job, ms", lambda turn: turn.cpu_ms),
    ("API server's CPU a job, ms", lambda turn: turn.api_cpu_ms),
    ("peak MiB", lambda turn: turn.peak_mib),
    ("writes a job", lambda turn: writes(turn.requests)),
)


def table(turns: Sequence[Turn]) -> str:
    """A line for each size and competitor: medians of the rounds, with minimum and maximum."""
    lines = []
    for nodes in dict.fromkeys(each.nodes for each in turns):
        for one in COMPETITORS:
            its = [each for each in turns if (each.nodes, each.competitor) == (nodes, one.name)]
            if its:
                figures = (spread([read(each) for each in its]) for _, read in COLUMNS)
                lines.append([f"{nodes}", one.name, *figures])
    return markdown(["nodes", "competitor", *(name for name, _ in COLUMNS)], lines)


def rows(restarts: Sequence[Restarted]) -> list[Row]:
    """The figures of the restarts."""
    by_name = {each.competitor: each for each in restarts}
    ours, other = by_name.get(CONTROLLER.name), by_name.get(JOBSET_SERVICE.name)
    if ours is None or other is None:
        return []
    of, beside = f"restart with {ours.jobs} jobs", f"beside {other.competitor}"
    return [
        row(f"{of}: writes", "", ours.writes),
        row(f"{of}: ready, {beside}", "s", ours.ready, other.ready),
        row(f"{of}: first action, {beside}", "s", ours.first_action, other.first_action),
        row(f"{of}: CPU, {beside}", "s", ours.cpu, other.cpu),
    ]
