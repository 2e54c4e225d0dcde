"""The bench detects a slow-down: the same burst and churn, unchanged and slowed."""

import asyncio

import uvloop

from torchrun_bench.churn import measured
from torchrun_bench.competitors import CONTROLLER, Running, Site
from torchrun_bench.http import Client
from torchrun_bench.options import Options
from torchrun_bench.processes import controller, free_port
from torchrun_bench.report import Row, row
from torchrun_bench.shapes import TARGET_NODES, site, wipe
from torchrun_bench.turns import Load, Sizes, Turn, turn, watched

FACTOR = 2.0
LEAST = 1.6  # share of the factor that must be visible: only code in the event loop is slowed


def planted(options: Options) -> list[Row]:
    """The CPU time of a burst and of the churn with factor 2, relative to factor 1."""
    events = options.events // 4
    churned = [measured("controller", events, plant).cpu_seconds for plant in (1.0, FACTOR)]
    with site("planted", options.teams) as on:
        bursts = [uvloop.run(_burst(on, options, plant)) for plant in (1.0, FACTOR)]
    what = f"a planted slow-down of {FACTOR:g}x, as it shows in"
    return [
        row(f"{what} the CPU of the churn", "x", churned[1] / churned[0], least=LEAST),
        row(f"{what} the CPU for a job of the burst", "x", bursts[1].cpu_ms / bursts[0].cpu_ms,
            least=LEAST),
        row(f"{what} the time for a job of the burst", "x", bursts[0].rate / bursts[1].rate),
    ]  # fmt: skip


async def _burst(on: Site, options: Options, plant: float) -> Turn:
    client, port = Client(on.server), free_port()
    sizes = Sizes(TARGET_NODES, options.idle, options.burst)
    async with watched(on) as children:
        load = Load(client, children, CONTROLLER, TARGET_NODES, options.teams)
        with controller(on.cluster.kubeconfig, port, plant=plant) as process:
            measured = await turn(on, load, CONTROLLER, Running(process.pid, port), sizes)
    client.close()
    await asyncio.to_thread(wipe, on)
    return measured
