"""The start of the controller in a cluster full of jobs, beside a client with the same lists."""

import time

import msgspec

from torchrun_bench.crowd import Crowd, crowd
from torchrun_bench.options import Options
from torchrun_bench.processes import (
    bare,
    controller,
    free_port,
    requests,
    settled,
    until_ready,
    wait_for_word,
)
from torchrun_bench.report import Row, row, say


class Cold(msgspec.Struct, frozen=True):
    """One start of an idle controller."""

    synced: float  # seconds from the start of the process
    at_rest: float  # likewise, until it has reconciled everything once
    cpu: float  # seconds
    peak_mib: float
    mib: float
    writes: int
    bare: float  # seconds until the bare client has read the same lists


def cold(options: Options) -> list[Row]:
    """A start beside jobs that the controller has seen before."""
    with crowd("cold", options.gang, options.spread) as on:
        on.fill(options.jobs)
        port = free_port()
        with controller(on.cluster.kubeconfig, port) as process:  # it updates the queues
            until_ready(port)
            settled(process.pid)
        return _rows(on, _measure(on))


def _measure(on: Crowd) -> Cold:
    start = time.monotonic()
    with bare(on.server, "", "list") as process:
        wait_for_word(process, "synced")
        floor = time.monotonic() - start
    port, start = free_port(), time.monotonic()
    with controller(on.cluster.kubeconfig, port) as process:
        until_ready(port)
        synced = time.monotonic() - start
        used = settled(process.pid)
        result = Cold(
            synced=synced,
            at_rest=time.monotonic() - start - 1,
            cpu=used.cpu_seconds,
            peak_mib=used.peak_mib,
            mib=used.mib,
            writes=requests(port).writes,
            bare=floor,
        )
    say(f"cold start with {on.jobs} jobs: {result}")
    return result


def _rows(on: Crowd, measured: Cold) -> list[Row]:
    of = f"cold start, {on.jobs} jobs, {on.jobs * on.gang} pods"
    return [
        row(f"{of}: process start to synced", "s", measured.synced, measured.bare),
        row(f"{of}: until all was looked at", "s", measured.at_rest),
        row(f"{of}: CPU", "s", measured.cpu),
        row(f"{of}: peak memory", "MiB", measured.peak_mib),
        row(f"{of}: memory afterwards", "MiB", measured.mib),
        row(f"{of}: writes", "", measured.writes),
    ]
