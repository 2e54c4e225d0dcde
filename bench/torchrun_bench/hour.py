"""An hour of pod events in a cluster full of running jobs: CPU share and growth of memory."""

import asyncio
import statistics
import time
from collections.abc import Sequence

import msgspec
import uvloop

from torchrun_bench.crowd import Crowd
from torchrun_bench.http import Client
from torchrun_bench.options import Options
from torchrun_bench.processes import (
    Requests,
    Usage,
    controller,
    free_port,
    requests,
    settled,
    until_ready,
    usage,
)
from torchrun_bench.report import Row, row, say

EVENTS_A_SECOND = 50
MERGE = "application/merge-patch+json"
SAMPLES = 60  # of memory
MOST_WAITING = 32  # requests
MOST_FAILED = 0.01  # share of the events


class Sample(msgspec.Struct, frozen=True):
    """The usage of the controller some seconds after the beginning."""

    seconds: float
    used: Usage


def hour(on: Crowd, options: Options) -> list[Row]:
    """Change pods at a constant rate, and sample the controller."""
    port = free_port()
    with controller(on.cluster.kubeconfig, port, plant=options.plant) as process:
        until_ready(port)
        settled(process.pid)
        before = requests(port)
        samples, changed = uvloop.run(_run(on, process.pid, options.minutes * 60))
        settled(process.pid)
        return rows(samples, changed, requests(port).since(before), options.minutes)


async def _run(on: Crowd, pid: int, seconds: float) -> tuple[list[Sample], int]:
    """Change pods for this time. Returns the samples, and the number of changes."""
    client, start = Client(on.server), time.monotonic()
    samples = [Sample(0.0, usage(pid))]
    sent_count, failed, waiting = 0, 0, 0

    async def change(number: int) -> None:
        nonlocal failed, waiting
        waiting += 1
        try:
            await _change(client, on, number)
        except (RuntimeError, OSError, TimeoutError) as error:
            failed += 1
            say(f"hour: {error}")
        finally:
            waiting -= 1

    async with asyncio.TaskGroup() as tasks:
        while (now := time.monotonic() - start) < seconds:
            if now >= len(samples) * seconds / SAMPLES:
                samples.append(Sample(now, usage(pid)))
                if len(samples) % (SAMPLES // 6) == 0:
                    mib = samples[-1].used.mib
                    say(f"hour: {now / 60:.0f} min, {sent_count} events, {mib:.0f} MiB")
            # An API server that cannot keep up gets fewer, and the figures have the rate that was.
            due = max(
                min(int(now * EVENTS_A_SECOND), sent_count + MOST_WAITING - waiting), sent_count
            )
            for number in range(sent_count, due):
                tasks.create_task(change(number))
            sent_count = due
            await asyncio.sleep(1 / EVENTS_A_SECOND)
    samples.append(Sample(time.monotonic() - start, usage(pid)))
    client.close()
    # A busy API server may refuse some.
    if failed > sent_count * MOST_FAILED:
        raise RuntimeError(f"{failed} of {sent_count} changes of pods failed")
    return samples, sent_count - failed


async def _change(client: Client, on: Crowd, number: int) -> None:
    """Change the status of a pod, as a kubelet does."""
    job = 1 + number * 7919 % max(on.jobs - 1, 1)
    name = pod_name(on.pods, job, number)
    path = f"/api/v1/namespaces/{on.namespace_of(job)}/pods/{name}/status"
    body = msgspec.json.encode({"status": {"message": f"event {number}"}})
    await client.send("PATCH", path, body, MERGE)


def pod_name(originals: Sequence[str], job: int, number: int) -> str:
    """A pod of a copied job."""
    return originals[number % len(originals)].replace("xxxxx", f"{job:05d}")


def slope(samples: Sequence[Sample]) -> float:
    """The growth of memory in MiB an hour, by linear regression over the later half.

    The first half fills the caches of the allocator.
    """
    late = samples[len(samples) // 2 :]
    if len(late) < 2:
        return 0.0
    hours, mib = [each.seconds / 3600 for each in late], [each.used.mib for each in late]
    return statistics.linear_regression(hours, mib).slope


def rows(
    samples: Sequence[Sample], changed: int, request_counts: Requests, minutes: float
) -> list[Row]:
    """The figures."""
    first, last = samples[0], samples[-1]
    seconds = last.seconds - first.seconds
    of = f"{minutes:g} min of pod events"
    cpu = last.used.cpu_seconds - first.used.cpu_seconds
    return [
        row(f"{of}: rate, of {EVENTS_A_SECOND} requested", "1/s", changed / seconds),
        row(f"{of}: share of a core", "%", 100 * cpu / seconds),
        row(f"{of}: CPU for an event", "ms", cpu / max(changed, 1) * 1000),
        row(f"{of}: memory at the beginning", "MiB", first.used.mib),
        row(f"{of}: memory at the end", "MiB", last.used.mib),
        row(f"{of}: growth of memory", "MiB/h", slope(samples)),
        row(f"{of}: writes", "", request_counts.writes, most=0),
    ]
