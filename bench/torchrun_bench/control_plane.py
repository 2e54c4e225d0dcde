"""The API server of a part: real etcd and kube-apiserver, our CRDs and a queue, otherwise idle."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from torchrun_bench.bodies import team, torchrun_queue
from torchrun_bench.http import Client, Server
from torchrun_bench.processes import CONTROLLER_NAMESPACE, NAMESPACES
from torchrun_bench.report import say
from torchrun_cluster import ClusterError, LocalCluster, Size

ROOT = Path(__file__).resolve().parent.parent.parent


def name_of(part: str) -> str:
    """The name of the cluster of a part."""
    return f"bench-{part}-{os.getpid()}"


def cluster(part: str, *, scheduler: bool = False) -> LocalCluster:
    """A control plane whose Job controller has no client-side rate limits."""
    limits = ["--kube-api-qps=1000", "--kube-api-burst=2000"]
    return LocalCluster(
        name=name_of(part),
        size=Size.CONTROL_PLANE,
        scheduler=scheduler,
        extra_args={"kube-controller-manager": limits},
    )


@contextmanager
def serving(part: str) -> Iterator[tuple[LocalCluster, Server]]:
    """A control plane without the Job controller, so only the two sides and the load are active."""
    say(f"{part}: starts an API server")
    with cluster(part) as started:
        server = prepare(started)
        started.stop("kube-controller-manager")
        yield started, server


def prepare(on: LocalCluster) -> Server:
    """CRDs, namespaces and the queue."""
    for crd in sorted((ROOT / "manifests" / "crd").glob("*.yaml")):
        on.kubectl("apply", "--server-side", "-f", str(crd))
    wait_for_crds(on)
    for namespace in NAMESPACES:
        on.kubectl("create", "namespace", namespace)
    queue = torchrun_queue(CONTROLLER_NAMESPACE)
    on.kubectl("apply", "-f", "-", stdin=msgspec.json.encode(queue).decode())
    return Server(
        url=on.server,
        ca_file=str(on.ca_file),
        certificate=str(on.client_certificate),
        key=str(on.client_key),
    )


def wait_for_crds(on: LocalCluster, seconds: float = 120.0) -> None:
    """Wait until the API server serves all CRDs. Raises ClusterError after a timeout."""
    end = time.monotonic() + seconds
    while True:
        try:
            on.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
            return
        except ClusterError:
            # kubectl fails at a CRD whose status has no conditions yet.
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


async def create_teams(server: Server, teams: int) -> None:
    """Create namespaces, each with the queue."""
    client = Client(server)
    for number in range(teams):
        name = team(number)
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        await client.send("POST", "/api/v1/namespaces", msgspec.json.encode(namespace))
        path = f"/apis/torchrun.ai/v1alpha1/namespaces/{name}/torchrunqueues"
        await client.send("POST", path, msgspec.json.encode(torchrun_queue(name)))
    client.close()
