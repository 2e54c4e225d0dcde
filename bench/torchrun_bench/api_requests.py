"""Requests and CPU of the API server, from its metrics and from /proc.

The API server counts the requests of every program in the same way. Only one competitor runs at a
time, so what is left without the requests of the load and of the API server itself is its own.
"""

import re
from collections.abc import Mapping

import msgspec

from torchrun_bench.competitors import Site
from torchrun_bench.http import Client
from torchrun_bench.processes import usage
from torchrun_cluster import processes, state

_SAMPLE = re.compile(r"^apiserver_request_total\{(.*)\} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
READS = frozenset({"get", "list", "watch"})
# Reviews are posted, and write nothing.
NOT_WRITES = ("subjectaccessreviews", "selfsubjectaccessreviews", "selfsubjectrulesreviews")
# The API server keeps these up to date itself, and the bench reads its metrics.
_ITS_OWN = frozenset(
    {"leases", "endpoints", "endpointslices", "flowschemas", "prioritylevelconfigurations",
     "apiservices", "servicecidrs", "ipaddresses", ""}
)  # fmt: skip

Counts = Mapping[str, float]  # by "verb resource"


def parse(text: str) -> dict[str, float]:
    """Requests by verb and resource, such as "patch jobs" or "apply torchrunjobs/status".

    Watches are left out: the API server counts them when they end.
    """
    counts: dict[str, float] = {}
    for labels, value in _SAMPLE.findall(text):
        label = dict(_LABEL.findall(labels))
        verb, resource = label["verb"].lower(), label["resource"]
        if verb == "watch" or resource in _ITS_OWN:
            continue
        if label.get("subresource"):
            resource += f"/{label['subresource']}"
        counts[f"{verb} {resource}"] = counts.get(f"{verb} {resource}", 0) + float(value)
    return counts


def since(now: Counts, before: Counts, created: Mapping[str, int]) -> dict[str, float]:
    """The requests since `before`, without those with which the load created objects."""
    requests = {kind: n - before.get(kind, 0) - created.get(kind, 0) for kind, n in now.items()}
    return {kind: number for kind, number in sorted(requests.items()) if number > 0}


def writes(counts: Counts) -> float:
    """The writes among the requests, without events."""
    return sum(
        number
        for kind, number in counts.items()
        if kind.split()[0] not in READS
        and not kind.endswith(NOT_WRITES)
        and kind.split()[1] != "events"
    )


async def counted(client: Client) -> dict[str, float]:
    """The requests that the API server has answered so far."""
    return parse((await client.send("GET", "/metrics")).decode())


class ServerCpu(msgspec.Struct, frozen=True):
    """CPU seconds of the API server and of etcd."""

    api: float
    etcd: float

    def since(self, before: "ServerCpu") -> "ServerCpu":
        """The CPU seconds since `before`."""
        return ServerCpu(self.api - before.api, self.etcd - before.etcd)


def server_cpu(site: Site) -> ServerCpu:
    """Read the CPU time of both."""
    owner = state.folder_of(site.name)
    api, etcd = (
        sum(usage(process.pid).cpu_seconds for process in processes.of_cluster(owner, component))
        for component in ("kube-apiserver", "etcd")
    )
    return ServerCpu(api, etcd)
