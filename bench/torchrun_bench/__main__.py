"""`make bench`: how fast jobs start, and how fast gangs start again.

Starts: the controller beside a bare client, in turn, on one API server. Both make the same writes
for each job, the Job and its status, by server-side apply. Restarts: see `restarts.py`.
"""

import argparse
import asyncio
import os
import signal
import statistics
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import uvloop

from torchrun_api.json import JsonObject
from torchrun_api.kinds import TORCHRUN_JOBS
from torchrun_api.queue import TorchrunQueue
from torchrun_bench import restarts
from torchrun_bench.bare import NAME, NAMESPACE, UID, Write
from torchrun_bench.http import Server
from torchrun_bench.load import Watched
from torchrun_bench.processes import (
    BARE_NAMESPACE,
    CONTROLLER_NAMESPACE,
    bare,
    controller,
    free_port,
    ready,
    usage,
)
from torchrun_bench.report import Row, percentile, save, table
from torchrun_cluster import LocalCluster, Size
from torchrun_controller.reconcile import Defaults, Observed, reconcile

ROOT = Path(__file__).resolve().parent.parent.parent
QUEUE: JsonObject = {"image": "bench/none", "nodeResources": {"cpus": 1, "memory": "1Gi"}}


def plan() -> bytes:
    """The controller's own writes for one job of the bench, as the bare client's template."""
    job = msgspec.convert(
        {
            "metadata": {
                "name": NAME.decode(),
                "namespace": NAMESPACE.decode(),
                "uid": UID.decode(),
            },
            "spec": {"jobQueue": "bench", "numNodes": 1, "command": "python train.py"},
        },
        TORCHRUN_JOBS.type,
    )
    queue = msgspec.convert({"spec": QUEUE}, TorchrunQueue)
    now = datetime.now(UTC).replace(microsecond=0)
    decided = reconcile(Observed(job=job, queue=queue), now, Defaults(runtime_image="bench/none"))
    child = decided.applies[0]
    status = {
        "apiVersion": TORCHRUN_JOBS.api_version,
        "kind": TORCHRUN_JOBS.kind,
        "metadata": {"name": NAME.decode(), "namespace": NAMESPACE.decode()},
        "status": decided.status,
    }
    here = "{namespace}", "{name}"
    writes = [
        (child.kind.path(*here) + "?fieldManager=bare", child.body),
        (TORCHRUN_JOBS.path(*here, "status") + "?fieldManager=bare-status&force=true", status),
    ]
    return msgspec.json.encode(
        [Write(path=path, body=msgspec.Raw(msgspec.json.encode(body))) for path, body in writes]
    )


async def latency(sides: tuple[Watched, Watched], jobs: int) -> list[Row]:
    """One job at a time, the sides in turn."""
    ours: list[float] = []
    floor: list[float] = []
    for number in range(-5, jobs):
        first = await sides[0].run(f"one-{number + 5}") * 1000
        second = await sides[1].run(f"one-{number + 5}") * 1000
        if number >= 0:
            ours.append(first)
            floor.append(second)
    rows = []
    for percent, most in ((50, 1.5), (99, 2.0)):
        left, right = percentile(ours, percent), percentile(floor, percent)
        what = f"one job at idle, CR created to child Job seen, p{percent} of {jobs}"
        rows.append(_row(what, "ms", left, right, f"<= {most}", left / right <= most))
    return rows


async def burst(sides: tuple[Watched, Watched], jobs: int, rounds: int, pid: int) -> list[Row]:
    """Many jobs at once, the sides in turn; the median round counts."""
    rates: tuple[list[float], list[float]] = ([], [])
    cpu: list[float] = []
    for number in range(rounds):
        before = usage(pid).cpu_seconds
        for side, kept in zip(sides, rates, strict=True):
            kept.append(jobs / await side.burst(f"burst-{number}", jobs))
            if side is sides[0]:
                cpu.append((usage(pid).cpu_seconds - before) / jobs * 1000)
    ours, floor = (statistics.median(kept) for kept in rates)
    what = f"burst of {jobs}, child Jobs a second, median of {rounds}"
    return [
        _row(what, "1/s", ours, floor, ">= 0.6", ours / floor >= 0.6),
        _row("controller CPU for a job of the burst", "ms", statistics.median(cpu), None, "", True),
        _row("controller peak memory", "MiB", usage(pid).peak_mib, None, "", True),
    ]


def _row(what: str, unit: str, ours: float, floor: float | None, target: str, met: bool) -> Row:
    ratio = None if floor is None else ours / floor
    return Row(what, unit, round(ours, 2), floor, ratio, target, met)


async def measure(server: Server, pid: int, port: int, options: argparse.Namespace) -> list[Row]:
    """All figures, on a cluster on which both sides run already."""
    async with server.session() as session, asyncio.TaskGroup() as tasks:
        sides = (Watched(session, CONTROLLER_NAMESPACE), Watched(session, BARE_NAMESPACE))
        followers = [tasks.create_task(side.follow()) for side in sides]
        await ready(port)
        rows = await latency(sides, options.jobs)
        rows += await burst(sides, options.burst, options.rounds, pid)
        for follower in followers:
            follower.cancel()
    return rows


def prepare(cluster: LocalCluster) -> Server:
    """CRDs, namespaces and the queue."""
    for crd in sorted((ROOT / "manifests" / "crd").glob("*.yaml")):
        cluster.kubectl("apply", "--server-side", "-f", str(crd))
    cluster.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")
    for namespace in (CONTROLLER_NAMESPACE, BARE_NAMESPACE):
        cluster.kubectl("create", "namespace", namespace)
    queue = {
        "apiVersion": "torchrun.ai/v1alpha1",
        "kind": "TorchrunQueue",
        "metadata": {"name": "bench", "namespace": CONTROLLER_NAMESPACE},
        "spec": QUEUE,
    }
    cluster.kubectl("apply", "-f", "-", stdin=msgspec.json.encode(queue).decode())
    return Server(
        url=cluster.server,
        ca_file=str(cluster.ca_file),
        certificate=str(cluster.client_certificate),
        key=str(cluster.client_key),
    )


def measure_starts(options: argparse.Namespace) -> list[Row]:
    """Without the Job controller, so that nothing but the two sides and the load works."""
    name = f"bench-{os.getpid()}"
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalCluster(name=name, size=Size.CONTROL_PLANE) as cluster,
    ):
        server, port = prepare(cluster), free_port()
        cluster.stop("kube-controller-manager")
        with (
            controller(cluster.kubeconfig, port) as process,
            bare(server, plan(), Path(folder)),
        ):
            return uvloop.run(measure(server, process.pid, port, options))


def measure_restarts(options: argparse.Namespace) -> list[Row]:
    """With the Job controller, on nodes that kwok plays."""
    with restarts.cluster(f"bench-restarts-{os.getpid()}") as cluster:
        server, port = prepare(cluster), free_port()
        with restarts.kwok(cluster), controller(cluster.kubeconfig, port):
            return uvloop.run(restarts.measure(server, port, options.restarts))


def main() -> int:
    """Measure, print, keep; the exit code says whether every target was met."""
    parser = argparse.ArgumentParser("make bench", description=__doc__)
    parser.add_argument("--part", choices=["starts", "restarts"], help="only one (default: both)")
    parser.add_argument("--jobs", type=int, default=100, help="jobs one at a time")
    parser.add_argument("--burst", type=int, default=1000, help="jobs of a burst")
    parser.add_argument("--rounds", type=int, default=3, help="bursts of each side")
    parser.add_argument("--restarts", type=int, default=100, help="gangs restarted one at a time")
    parser.add_argument("--no-save", action="store_true", help="keep no file of results")
    options = parser.parse_args()
    # An end by SIGTERM takes the cluster down as any other does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    rows: list[Row] = []
    if options.part != "restarts":
        rows += measure_starts(options)
    if options.part != "starts":
        rows += measure_restarts(options)
    print(table(rows))
    if not options.no_save:
        print(f"\nkept in {save(rows)}")
    return 0 if all(row.met for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
