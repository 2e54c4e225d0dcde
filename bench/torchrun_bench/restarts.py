"""Gang restarts.

Nodes and pods are kwok's; API server, Job controller, scheduler and controller are real. Each job
is restarted once, because only the first restart has no delay. Times are those of events in the
watches of the bench, by its monotonic clock.

The bare client deletes the old Job and applies the next one as soon as it sees a failed pod.
"""

import aiohttp
import msgspec
import uvloop

from torchrun_api import names
from torchrun_bench import kwok, plans
from torchrun_bench.control_plane import cluster, prepare
from torchrun_bench.gangs import FAILED, Gangs, create
from torchrun_bench.http import Server
from torchrun_bench.options import Options
from torchrun_bench.processes import (
    BARE_NAMESPACE,
    CONTROLLER_NAMESPACE,
    bare,
    controller,
    free_port,
    ready,
)
from torchrun_bench.report import Row, percentile, row, say

GANG = 8
FAILING = 3  # index of the pod that fails
WARM_UP = 5


class Restart(msgspec.Struct, frozen=True):
    """Seconds from the first failed pod of a gang to each later step."""

    child_job: float
    first_pod: float
    all_pods: float


class Whole(Restart, frozen=True):
    """Further steps, which a stateless client does not have."""

    ranks: float
    running: float


def restarts(options: Options) -> list[Row]:
    """Sequential restarts, the sides in turn, on kwok nodes."""
    say("restart: starts an API server, scheduler, Job controller and kwok")
    with cluster("restart", scheduler=True) as on:
        server, port = prepare(on), free_port()
        with (
            kwok.playing(on),
            controller(on.kubeconfig, port),
            bare(server, BARE_NAMESPACE, plan=plans.same_writes(GANG)),
        ):
            return uvloop.run(_restarts(server, port, options.restarts))


async def _restarts(server: Server, port: int, count: int) -> list[Row]:
    await ready(port)
    ours: list[Whole] = []
    floor: list[Restart] = []
    async with server.session() as session:
        left, right = Gangs(session, CONTROLLER_NAMESPACE), Gangs(session, BARE_NAMESPACE)
        async with left.following(), right.following():
            for number in range(WARM_UP + count):
                name = f"gang-{number}"
                ours.append(await _whole(session, left, name))
                floor.append(await _bare(session, right, name))
                if number % 20 == 19:
                    say(f"restart: {number + 1} of {WARM_UP + count} gangs")
    return rows(ours[WARM_UP:], floor[WARM_UP:])


async def _whole(session: aiohttp.ClientSession, gangs: Gangs, job: str) -> Whole:
    """Measure a job of the controller from its creation until its second gang runs."""
    await create(session, CONTROLLER_NAMESPACE, job, GANG)
    await gangs.until(lambda: (job, 0) in gangs.running)
    await gangs.end(sorted(gangs.pods[job, "0"])[FAILING], FAILED)
    await gangs.until(lambda: (job, 1) in gangs.running)
    restart = _restart(gangs, job)
    failure_time = gangs.failed[job]
    await gangs.delete(job)
    return Whole(
        *(restart.child_job, restart.first_pod, restart.all_pods),
        ranks=max(gangs.started[job, "1"].values()) - failure_time,
        running=gangs.running[job, 1] - failure_time,
    )


async def _bare(session: aiohttp.ClientSession, gangs: Gangs, job: str) -> Restart:
    await create(session, BARE_NAMESPACE, job, GANG)
    await gangs.until(lambda: len(gangs.up.get((job, "0"), ())) == GANG)
    await gangs.end(sorted(gangs.pods[job, "0"])[FAILING], FAILED)
    await gangs.until(lambda: len(gangs.up.get((job, "1"), ())) == GANG)
    restart = _restart(gangs, job)
    await gangs.delete(job)
    return restart


def _restart(gangs: Gangs, job: str) -> Restart:
    pods = sorted(gangs.pods[job, "1"].values())
    assert len(pods) == GANG, f"{job}: {len(pods)} pods in the second gang"
    failure_time = gangs.failed[job]
    child = gangs.children[names.child_job(job, 1)]
    return Restart(child - failure_time, pods[0] - failure_time, pods[-1] - failure_time)


def rows(ours: list[Whole], floor: list[Restart]) -> list[Row]:
    """The figures."""
    result = []
    for percent in (50, 99):
        what = f"gang of {GANG}, first failed pod to all pods of the next, p{percent}, {len(ours)}"
        left, right = (
            percentile([each.all_pods for each in side], percent) for side in (ours, floor)
        )
        result.append(row(what, "s", left, right))
    for percent in (50, 99):
        what = f"until the new Job is seen, p{percent}"
        left, right = (
            percentile([each.child_job for each in side], percent) for side in (ours, floor)
        )
        result.append(row(what, "s", left, right))
    for part, what in (
        ("ranks", "until every rank may start"),
        ("running", "until the phase is Running again"),
    ):
        result.append(row(f"{what}, p50", "s", percentile([getattr(r, part) for r in ours], 50)))
    return result
