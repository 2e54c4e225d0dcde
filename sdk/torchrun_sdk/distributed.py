"""The addresses of a job's pods, from inside one of them or from outside."""

from __future__ import annotations

import json
import os
import socket
import time
from typing import Any

from torchrun_sdk.cluster.kubectl import Kubectl
from torchrun_sdk.cluster.manifest import ATTEMPT, LABEL, TERMINAL_PHASES, node_of, workers_of
from torchrun_sdk.compute import Seconds, seconds
from torchrun_sdk.errors import QuorumTimeout, UsageError

_POLL = 0.5


def pod_ips(
    quorum_workers: int | None = None,
    quorum_timeout: Seconds = 0,
    *,
    job: str = "",
    namespace: str = "",
) -> list[str]:
    """The addresses of the workers, in the order of their indexes.

    Inside a pod: of its own job, from DNS, which needs no permission. Outside: of `job`, or of the
    only running job of this package, from the API server.
    quorum_workers: wait for this number of addresses, at most for quorum_timeout. Raises
    QuorumTimeout, UsageError, ClusterError.
    """
    limit = seconds(quorum_timeout, "quorum_timeout")
    inside = "PET_MASTER_ADDR" in os.environ
    kubectl = Kubectl(namespace or os.environ.get("TORCHRUN_NAMESPACE", ""))
    name = job or ("" if inside else _only(kubectl))
    until = time.monotonic() + limit
    while True:
        addresses = _from_api(kubectl, name) if name else _from_dns(os.environ)
        if quorum_workers is None or len(addresses) >= quorum_workers:
            return addresses
        remaining = until - time.monotonic()
        if remaining <= 0:
            raise QuorumTimeout(
                f"Only {len(addresses)} of {quorum_workers} workers have an address after"
                f" {limit:g} s.",
                job=name or os.environ.get("TORCHRUN_JOB_NAME", ""),
            )
        time.sleep(min(_POLL, remaining))


def hosts(environment: dict[str, str] | os._Environ[str]) -> list[str]:
    """The DNS names of all workers, from the variables that the controller sets in each pod."""
    master = environment["PET_MASTER_ADDR"]
    nodes = int(environment.get("PET_NNODES", "1").rpartition(":")[2])
    first, dot, domain = master.partition(".")
    if not dot:  # a gang of one pod uses localhost
        return [socket.gethostname()]
    stem = first[: -len("-0")]
    if environment.get("TORCHRUN_ROLE"):  # head and workers have different child Jobs
        return [master, *(f"{stem}-w-{index}.{domain}" for index in range(nodes - 1))]
    return [f"{stem}-{index}.{domain}" for index in range(nodes)]


def _from_dns(environment: os._Environ[str]) -> list[str]:
    return [address for host in hosts(environment) if (address := _address(host))]


def _address(host: str) -> str:
    try:
        return socket.gethostbyname(host)
    except OSError:  # the name does not exist yet
        return ""


def _from_api(kubectl: Kubectl, job: str) -> list[str]:
    words = ["get", "pods", "--selector", workers_of(job), "--output=json"]
    listed = json.loads(kubectl.run(*words))["items"]
    pods = [pod for pod in listed if pod.get("status", {}).get("podIP")]
    pods = [pod for pod in pods if pod["status"].get("phase") in ("Pending", "Running")]
    latest = max((_attempt(pod) for pod in pods), default=0)
    pods = [pod for pod in pods if _attempt(pod) == latest]
    pods.sort(key=lambda pod: node_of(pod["metadata"]["labels"]))
    return [pod["status"]["podIP"] for pod in pods]


def _attempt(pod: dict[str, Any]) -> int:
    return int(pod["metadata"]["labels"].get(ATTEMPT, 0))


def _only(kubectl: Kubectl) -> str:
    words = ["get", "torchrunjobs", "--selector", LABEL, "--output=json"]
    listed = json.loads(kubectl.run(*words))["items"]
    running = [
        job["metadata"]["name"]
        for job in listed
        if (job.get("status") or {}).get("phase") not in TERMINAL_PHASES
    ]
    if len(running) != 1:
        raise UsageError(
            f"{len(running)} jobs are running ({', '.join(running) or 'none'}). Select one with"
            " pod_ips(job=NAME)."
        )
    return str(running[0])
