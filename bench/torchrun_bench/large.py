"""One gang of thousands of pods, beside the Job controller alone with a Job of as many pods.

Nodes and pods are kwok's; API server, Job controller, scheduler and controller are real. Each gang
is restarted once. For the Job controller alone, the bench ends the failed Job and creates the next
one as soon as it sees the first failed pod. It does so with plain pods, and with the pods of the
controller and their headless Service, whose survivors it ends as the controller does. These pods
are larger: the API server and all watches read them at each change. The difference to the
controller is the cost of its decisions.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

import aiohttp
import msgspec
import uvloop

from torchrun_api import names
from torchrun_api.json import JsonObject, object_at
from torchrun_api.kinds.resources import JOBS, PODS, SERVICES, Kind
from torchrun_bench import bare, bodies, kwok, plans
from torchrun_bench.control_plane import cluster, prepare
from torchrun_bench.gangs import FAILED, Gangs, create
from torchrun_bench.http import JSON, RefusedError, Server, send
from torchrun_bench.options import Options
from torchrun_bench.processes import (
    BARE_NAMESPACE,
    CONTROLLER_NAMESPACE,
    Requests,
    Usage,
    controller,
    free_port,
    ready,
    requests,
    settled,
)
from torchrun_bench.report import Row, row, say
from torchrun_controller.reconcile.gang.cleanup import SURVIVOR_GRACE

GANG = "gang"
FAILING = 3  # index of the pod that fails
MOST_SECONDS = 1200.0  # for each step
_CPUS = 64  # of a kwok node


class Steps(msgspec.Struct, frozen=True):
    """Seconds from the creation, and from the first failed pod."""

    pods_created: float
    pods_running: float
    # From the first failed pod to all pods of the next attempt, and until they run.
    pods_again: float
    running_again: float


class Cost(msgspec.Struct, frozen=True):
    """What the gang cost the controller. `phase_again` is in seconds from the first failed pod."""

    phase_running: float
    phase_again: float
    started: Requests
    restarted: Requests
    status_bytes: int
    used: Usage


def large(options: Options) -> list[Row]:
    """One gang of each size."""
    return [row for pods in options.large for row in _measure(pods)]


def _measure(pods: int) -> list[Row]:
    say(f"large: starts an API server, scheduler, Job controller and kwok for {pods} pods")
    with cluster("large", scheduler=True) as on:
        server, port = prepare(on), free_port()
        # The pods of the failed attempt end while those of the next one start.
        with kwok.playing(on, max(2 * pods // _CPUS, 1) + 1):
            plain = uvloop.run(_alone(server, pods, labelled_job, _delete_job))
            say(f"large: {pods} pods, the Job controller alone: {plain}")
            same = uvloop.run(_alone(server, pods, same_job, _end_survivors, same_service()))
            say(f"large: {pods} pods, the Job controller alone with the same pods: {same}")
            with controller(on.kubeconfig, port) as process:
                ours, cost = uvloop.run(_ours(server, pods, process.pid, port))
            say(f"large: {pods} pods, the controller: {ours}")
    return rows(pods, ours, plain, same, cost)


async def _alone(
    server: Server,
    pods: int,
    job_of: Callable[[int, int], JsonObject],
    end: Callable[[aiohttp.ClientSession], Awaitable[None]],
    service: JsonObject | None = None,
) -> Steps:
    """A gang of the Job controller alone. `end` ends what is left of the first attempt."""
    services = SERVICES.path(BARE_NAMESPACE)
    async with server.session() as session:
        gangs = Gangs(session, BARE_NAMESPACE, MOST_SECONDS)
        async with gangs.following():

            async def start(attempt: int) -> None:
                body = msgspec.json.encode(job_of(pods, attempt))
                await send(session, "POST", JOBS.path(BARE_NAMESPACE), body, JSON)

            async def again() -> None:
                await asyncio.gather(end(session), start(1))

            start_time = time.monotonic()
            await start(0)
            if service is not None:
                await send(session, "POST", services, msgspec.json.encode(service), JSON)
            steps = await _steps(gangs, pods, start_time, again)
            # One of the two ends leaves the Job of the first attempt.
            path = f"{JOBS.path(BARE_NAMESPACE)}?propagationPolicy=Background"
            await send(session, "DELETE", path, b"", JSON)
            await send(session, "DELETE", services, b"", JSON)
            await _until_gone(session, BARE_NAMESPACE)
            return steps


async def _delete_job(session: aiohttp.ClientSession) -> None:
    """Delete the Job of the first attempt. The grace period of its pods is that of the template."""
    options = msgspec.json.encode({"propagationPolicy": "Background"})
    await send(session, "DELETE", JOBS.path(BARE_NAMESPACE, f"{GANG}-0"), options, JSON)


async def _end_survivors(session: aiohttp.ClientSession) -> None:
    """Delete the pods of the first attempt that run, with the request of the controller.

    The API server gives up after a minute. The controller repeats the request, too.
    """
    selector = f"{names.ATTEMPT_LABEL}=0&fieldSelector=status.phase!=Succeeded,status.phase!=Failed"
    path = f"{PODS.path(BARE_NAMESPACE)}?labelSelector={selector}"
    options = msgspec.json.encode(
        {"propagationPolicy": "Background", "gracePeriodSeconds": SURVIVOR_GRACE}
    )
    async with asyncio.timeout(MOST_SECONDS):
        while not await _is_answered(send(session, "DELETE", path, options, JSON)):
            say("large: repeats the deletion of the survivors")


async def _is_answered(request: Awaitable[bytes]) -> bool:
    """Await a request; False if the API server gave up. Raises RefusedError."""
    try:
        await request
    except (aiohttp.ClientError, TimeoutError):
        return False
    except RefusedError as error:
        if error.status != HTTPStatus.GATEWAY_TIMEOUT:
            raise
        return False
    return True


def labelled_job(pods: int, attempt: int) -> JsonObject:
    """A plain Job whose pods have the labels by which `Gangs` knows them."""
    return _as_attempt(bodies.plain_job("", BARE_NAMESPACE, "", pods), attempt)


def same_job(pods: int, attempt: int) -> JsonObject:
    """The Job of the controller."""
    return _as_attempt(_decided(JOBS, pods), attempt)


def same_service() -> JsonObject:
    """The headless Service of the controller, which selects the pods of `same_job`."""
    body = _decided(SERVICES, 2)
    del object_at(body, "metadata")["ownerReferences"]
    return body


def _decided(kind: Kind[Any], pods: int) -> JsonObject:
    """The object of this kind in a new gang of the controller, with the names of this bench."""
    (body,) = (apply.body for apply in plans.decided(pods).applies if apply.kind is kind)
    text = msgspec.json.encode(body).replace(bare.NAMESPACE, BARE_NAMESPACE.encode())
    return msgspec.json.decode(text.replace(bare.NAME, GANG.encode()), type=JsonObject)


def _as_attempt(body: JsonObject, attempt: int) -> JsonObject:
    metadata, spec = body["metadata"], body["spec"]
    assert isinstance(metadata, dict)
    assert isinstance(spec, dict)
    del metadata["ownerReferences"]
    metadata["name"] = f"{GANG}-{attempt}"
    template = spec["template"]
    assert isinstance(template, dict)
    meta = template.setdefault("metadata", {})
    assert isinstance(meta, dict)
    labels = meta.setdefault("labels", {})
    assert isinstance(labels, dict)
    labels |= {names.JOB_LABEL: GANG, names.ATTEMPT_LABEL: str(attempt)}
    return body


async def _steps(
    gangs: Gangs, pods: int, start_time: float, again: Callable[[], Awaitable[None]] | None = None
) -> Steps:
    """Wait for the pods of a gang that was created, fail one, and wait for the next attempt.

    `again` starts the next attempt; None: the controller does.
    """
    await gangs.until(lambda: len(gangs.up.get((GANG, "0"), ())) == pods)
    if again is None:
        await gangs.until(lambda: (GANG, 0) in gangs.running)
    say(f"large: all {pods} pods run")
    await gangs.end(sorted(gangs.pods[GANG, "0"])[FAILING], FAILED)
    await gangs.until(lambda: GANG in gangs.failed)
    if again is not None:
        await again()
    await gangs.until(lambda: len(gangs.up.get((GANG, "1"), ())) == pods)
    return Steps(
        pods_created=max(gangs.pods[GANG, "0"].values()) - start_time,
        pods_running=max(gangs.up[GANG, "0"].values()) - start_time,
        pods_again=max(gangs.pods[GANG, "1"].values()) - gangs.failed[GANG],
        running_again=max(gangs.up[GANG, "1"].values()) - gangs.failed[GANG],
    )


async def _ours(server: Server, pods: int, pid: int, port: int) -> tuple[Steps, Cost]:
    await ready(port)
    async with server.session() as session:
        gangs = Gangs(session, CONTROLLER_NAMESPACE, MOST_SECONDS)
        async with gangs.following():
            before, start_time = requests(port), time.monotonic()
            await create(session, CONTROLLER_NAMESPACE, GANG, pods)
            await gangs.until(lambda: (GANG, 0) in gangs.running)
            await asyncio.to_thread(settled, pid)
            running = requests(port)
            steps = await _steps(gangs, pods, start_time)
            await gangs.until(lambda: (GANG, 1) in gangs.running)
            used = await asyncio.to_thread(settled, pid)
            async with session.get(f"{gangs.jobs_path}/{GANG}") as answer:
                status = msgspec.json.decode(await answer.read())["status"]
            return steps, Cost(
                phase_running=gangs.running[GANG, 0] - start_time,
                phase_again=gangs.running[GANG, 1] - gangs.failed[GANG],
                started=running.since(before),
                restarted=requests(port).since(running),
                status_bytes=len(msgspec.json.encode(status)),
                used=used,
            )


async def _until_gone(session: aiohttp.ClientSession, namespace: str) -> None:
    """Wait until the namespace has no pods."""
    async with asyncio.timeout(MOST_SECONDS):
        for _ in range(100_000):
            async with session.get(f"/api/v1/namespaces/{namespace}/pods?limit=1") as answer:
                if not msgspec.json.decode(await answer.read())["items"]:
                    return
            await asyncio.sleep(0.5)


def rows(pods: int, ours: Steps, plain: Steps, same: Steps, cost: Cost) -> list[Row]:
    """The figures beside the Job controller alone with plain pods, and with the same pods."""
    of = f"gang of {pods:,}"
    for what, request_counts in (("start", cost.started), ("restart", cost.restarted)):
        say(f"{of}, {what}: {request_counts.writes_by_kind()}")
    result = []
    for beside, its in (("a plain Job", plain), ("the same pods", same)):
        for what, field in (
            ("created to all pods created", "pods_created"),
            ("created to all pods running", "pods_running"),
            ("first failed pod to all new pods created", "pods_again"),
            ("first failed pod to all new pods running", "running_again"),
        ):
            left, right = getattr(ours, field), getattr(its, field)
            result.append(row(f"{of}: {what}, beside {beside}", "s", left, right))
    return [
        *result,
        row(f"{of}: created to the phase Running", "s", cost.phase_running),
        row(f"{of}: first failed pod to the phase Running", "s", cost.phase_again),
        row(f"{of}: writes for the start", "", cost.started.writes),
        row(f"{of}: writes for the restart", "", cost.restarted.writes),
        row(f"{of}: events", "", _events(cost.started) + _events(cost.restarted)),
        row(f"{of}: status", "bytes", cost.status_bytes),
        row(f"{of}: CPU", "s", cost.used.cpu_seconds),
        row(f"{of}: peak memory", "MiB", cost.used.peak_mib),
    ]


def _events(request_counts: Requests) -> int:
    return sum(n for (verb, what), n in request_counts.by_kind.items() if what.startswith("events"))
