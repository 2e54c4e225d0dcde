"""The bench detects a slow-down: the same burst and churn, unchanged and slowed."""

import asyncio

import uvloop

from torchrun_bench.churn import measured
from torchrun_bench.control_plane import serving
from torchrun_bench.load import Watched
from torchrun_bench.options import Options
from torchrun_bench.processes import CONTROLLER_NAMESPACE, controller, free_port, until_ready
from torchrun_bench.report import Row, row
from torchrun_bench.starts import Burst, one_burst

FACTOR = 2.0
LEAST = 1.6  # share of the factor that must be visible: only code in the event loop is slowed


def planted(options: Options) -> list[Row]:
    """The CPU time of a burst and of the churn with factor 2, relative to factor 1."""
    events = options.events // 4
    churned = [measured("controller", events, plant).cpu_seconds for plant in (1.0, FACTOR)]
    with serving("planted") as (cluster, server):
        bursts = []
        for plant in (1.0, FACTOR):
            port = free_port()
            with controller(cluster.kubeconfig, port, plant=plant) as process:
                until_ready(port)

                async def burst(pid: int = process.pid, plant: float = plant) -> Burst:
                    async with server.session() as session, asyncio.TaskGroup() as tasks:
                        watched = Watched(session, CONTROLLER_NAMESPACE)
                        follower = await watched.follow(tasks)
                        await one_burst(watched, pid, f"warm-{plant:g}", options.burst // 10)
                        burst = await one_burst(watched, pid, f"plant-{plant:g}", options.burst)
                        follower.cancel()
                        return burst

                bursts.append(uvloop.run(burst()))
    what = f"a planted slow-down of {FACTOR:g}x, as it shows in"
    return [
        row(f"{what} the CPU of the churn", "x", churned[1] / churned[0], least=LEAST),
        row(f"{what} the CPU for a job of the burst", "x", bursts[1].cpu_ms / bursts[0].cpu_ms,
            least=LEAST),
        row(f"{what} the time for a job of the burst", "x", bursts[0].rate / bursts[1].rate),
    ]  # fmt: skip
