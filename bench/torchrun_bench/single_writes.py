"""What one write costs: its latency, and the API server's CPU, one request at a time.

The sum over the writes of a job is what a burst takes of the API server. The kinds of writes take
turns. The Job and the Service are those of the controller, for a gang of two nodes.
"""

import statistics
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import uvloop

from torchrun_api.json import JsonObject
from torchrun_api.kinds import JOBS, SERVICES, TORCHRUN_JOBS, Kind
from torchrun_bench import bodies
from torchrun_bench.api_requests import server_cpu
from torchrun_bench.bare import NAME, NAMESPACE, UID
from torchrun_bench.competitors import Site
from torchrun_bench.http import APPLY, JSON, Client
from torchrun_bench.options import Options
from torchrun_bench.plans import decided
from torchrun_bench.report import Row, row
from torchrun_bench.shapes import TARGET_NODES, site
from torchrun_controller.client.apply import ABSENT

_OWNER_UID = b"00000000-0000-4000-8000-000000000000"
_MANAGER = "fieldManager=bench"


class Variant(msgspec.Struct, frozen=True):
    """A kind of request.

    `body` has the placeholders of the bare client, `target` has {} for the name.
    """

    method: str
    target: str
    body: bytes
    is_status: bool = False  # of a TorchrunJob, which is created before


class Cost(msgspec.Struct, frozen=True):
    """Milliseconds: the median latency, and the median of the API server's CPU over the turns."""

    latency: float
    cpu: float


def variants(nodes: int = TARGET_NODES) -> dict[str, Variant]:
    """The compared writes by name."""
    plan = decided(nodes)
    by_kind = {apply.kind.kind: apply.body for apply in plan.applies}
    plain = bodies.plain_job(NAME.decode(), NAMESPACE.decode(), UID.decode(), nodes)
    job = bodies.torchrun_job(NAME.decode(), nodes)
    status: JsonObject = {**job, "status": msgspec.to_builtins(plan.status)}
    del status["spec"]
    return {
        "plain Job, POST": _post(JOBS, plain),
        "child Job, POST": _post(JOBS, by_kind[JOBS.kind]),
        "child Job, apply": _apply(JOBS, by_kind[JOBS.kind]),
        "Service, POST": _post(SERVICES, by_kind[SERVICES.kind]),
        "Service, apply": _apply(SERVICES, by_kind[SERVICES.kind]),
        "TorchrunJob, POST": _post(TORCHRUN_JOBS, job),
        "status, apply": Variant(
            "PATCH",
            TORCHRUN_JOBS.path(bodies.team(0), "{}", "status") + f"?{_MANAGER}&force=true",
            _encoded(status),
            is_status=True,
        ),
    }


def _post(kind: Kind[Any], body: JsonObject) -> Variant:
    query = f"?{_MANAGER}&fieldValidation=Strict"
    return Variant("POST", kind.path(bodies.team(0)) + query, _encoded(body))


def _apply(kind: Kind[Any], body: JsonObject) -> Variant:
    metadata = body["metadata"]
    assert isinstance(metadata, dict)
    new = {**body, "metadata": {**metadata, "resourceVersion": ABSENT}}
    return Variant("PATCH", kind.path(bodies.team(0), "{}") + f"?{_MANAGER}", _encoded(new))


def _encoded(body: JsonObject) -> bytes:
    return msgspec.json.encode(body).replace(NAMESPACE, bodies.team(0).encode())


def single_writes(options: Options) -> list[Row]:
    """The costs of each kind of write, beside those of another way to do the same."""
    with site("writes", 1) as on:
        costs = uvloop.run(_measure(on, options))
    return rows(costs)


async def _measure(on: Site, options: Options) -> dict[str, Cost]:
    latencies: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}
    client = Client(on.server)
    for turn in range(options.rounds + 1):
        for number, (name, variant) in enumerate(variants().items()):
            names = [f"write-{turn}-{number}-{n}" for n in range(options.writes)]
            if variant.is_status:
                for each in names:
                    await _send(client, variants()["TorchrunJob, POST"], each)
            before = server_cpu(on)
            times = [await _send(client, variant, each) for each in names]
            used = server_cpu(on).since(before)
            if turn:  # the first turn warms up
                latencies.setdefault(name, []).extend(times)
                cpu.setdefault(name, []).append(used.api / len(names) * 1000)
    client.close()
    return {
        name: Cost(statistics.median(times) * 1000, statistics.median(cpu[name]))
        for name, times in latencies.items()
    }


async def _send(client: Client, variant: Variant, name: str) -> float:
    """Send one request. Returns the seconds until its response."""
    body = variant.body.replace(UID, _OWNER_UID).replace(NAME, name.encode())
    content_type = APPLY if variant.method == "PATCH" else JSON
    start = time.monotonic()
    await client.send(variant.method, variant.target.format(name), body, content_type)
    return time.monotonic() - start


def rows(costs: dict[str, Cost]) -> list[Row]:
    """The writes of a job, beside a POST of the same object or the Job that a user writes."""
    return list(_rows(costs))


def _rows(costs: dict[str, Cost]) -> Iterator[Row]:
    for name, other, beside in (
        ("child Job, apply", "child Job, POST", "a POST"),
        ("child Job, POST", "plain Job, POST", "that of a plain Job"),
        ("Service, apply", "Service, POST", "a POST"),
        ("TorchrunJob, POST", "", ""),
        ("status, apply", "", ""),
    ):
        what = f"{name}, beside {beside}" if other else name
        for figure, ours, its in (
            ("p50", costs[name].latency, costs[other].latency if other else None),
            ("API server's CPU", costs[name].cpu, costs[other].cpu if other else None),
        ):
            yield row(f"{what}: {figure}", "ms", ours, its)
