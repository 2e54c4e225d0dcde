"""Quantities are parsed and formatted as by the API server."""

import json
from fractions import Fraction
from typing import Any

import pytest

from torchrun_api.kinds.quantity import format_bytes, format_cpu, parse
from torchrun_cluster import LocalCluster

CPUS = [Fraction(n, d) for n in (1, 7, 96, 128) for d in (1, 3, 8, 1000)]
BYTES = [Fraction(n * 1024**p, d) for n in (1, 10, 1536) for p in (0, 2, 3, 4) for d in (1, 3)]


def stored(cluster: LocalCluster, resources: list[dict[str, str]]) -> list[dict[str, str]]:
    """The requests of the containers of a Pod in the format of the API server."""
    containers = [
        {"name": f"c{number}", "image": "a", "resources": {"requests": requests}}
        for number, requests in enumerate(resources)
    ]
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "quantities"},
        "spec": {"containers": containers},
    }
    answer = cluster.kubectl(
        *("create", "--dry-run=server", "-o", "json", "-f", "-"), stdin=json.dumps(pod)
    )
    answers: dict[str, Any] = json.loads(answer.stdout)
    return [c["resources"]["requests"] for c in answers["spec"]["containers"]]


def test_formatted_quantities_are_canonical(cluster: LocalCluster) -> None:
    written = [
        *({"cpu": format_cpu(cores)} for cores in CPUS),
        *({"memory": format_bytes(amount)} for amount in BYTES),
    ]
    assert stored(cluster, written) == written


@pytest.mark.parametrize(
    "text", ["1e3", "1E3", "1.5Gi", "0.5", ".5", "+1", "1500m", "12e-1", "1k", "1M", "3Ki", "5."]
)
def test_parsed_quantities_equal_the_servers(cluster: LocalCluster, text: str) -> None:
    """The canonical form of the server must be the same amount."""
    (read,) = stored(cluster, [{"cpu": text}])
    assert parse(read["cpu"]) == parse(text)
