"""A cluster full of running jobs, created by copying one job in etcd.

The real controller, Job controller and scheduler create one gang, which runs on kwok nodes. Then
they are stopped, and the objects of the gang in etcd (TorchrunJob, Job, Service, pods) are copied
with other names, namespaces and UIDs of the same length, which keeps the encodings valid. So each
copy is byte for byte like a real idle job.
"""

import asyncio
import contextlib
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import aiohttp
import msgspec
import uvloop

from torchrun_bench import bodies, kwok
from torchrun_bench.control_plane import cluster, create_teams, name_of, prepare
from torchrun_bench.etcd import Etcd
from torchrun_bench.gangs import create
from torchrun_bench.http import Server
from torchrun_bench.processes import (
    CONTROLLER_NAMESPACE,
    controller,
    free_port,
    ready,
    settled,
)
from torchrun_bench.report import say
from torchrun_cluster import ClusterError, LocalCluster

MOST_SECONDS = 400.0  # until the API server serves all copies
ORIGINAL = "gang-xxxxx"
COPIED = (
    "/registry/torchrun.ai/torchrunjobs/",
    "/registry/jobs/",
    "/registry/services/specs/",
    "/registry/pods/",
)
# Values that copies share.
SHARED_PREFIXES = (
    "/registry/torchrun.ai/torchrunqueues/",
    "/registry/minions/",
    "/registry/namespaces/",
)
ORIGINAL_PATH = (
    f"/apis/torchrun.ai/v1alpha1/namespaces/{CONTROLLER_NAMESPACE}/torchrunjobs/{ORIGINAL}"
)
JOBS = "/apis/torchrun.ai/v1alpha1/torchrunjobs"
PODS = "/api/v1/pods"

_UID = re.compile(rb"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


class Crowd:
    """A cluster with only etcd and the API server, which can be filled with jobs."""

    def __init__(self, on: LocalCluster, name: str, server: Server, gang: int, teams: int) -> None:
        self.cluster = on
        self.server = server
        self.gang = gang
        self.teams = teams
        self.jobs = 1
        self._name = name
        etcd = Etcd(name)
        self._original = {
            key: value
            for prefix in COPIED
            for key, value in etcd.under(f"{prefix}{CONTROLLER_NAMESPACE}/").items()
        }
        others = [value for prefix in SHARED_PREFIXES for value in etcd.under(prefix).values()]
        etcd.close()
        self._uids = sorted(_uids(self._original.values()) - _uids(others))

    def fill(self, jobs: int) -> None:
        """Create jobs up to this number, each with its pods. Stops the API server meanwhile."""
        start = time.monotonic()
        self.cluster.stop("kube-apiserver")
        etcd = Etcd(self._name)
        object_count = etcd.put(
            pair for number in range(self.jobs, jobs) for pair in self._copy(number)
        )
        etcd.close()
        # It reads all objects before it is ready, which takes minutes on a busy machine.
        with contextlib.suppress(ClusterError):
            self.cluster.start("kube-apiserver")
        self.cluster.wait_ready(MOST_SECONDS)
        self.jobs = jobs
        pods = uvloop.run(self._wait_until_complete(jobs))
        say(
            f"crowd: {jobs} jobs with {pods} pods in {self.teams} namespaces,"
            f" {object_count} objects written in {time.monotonic() - start:.0f} s"
        )

    def _copy(self, number: int) -> Iterator[tuple[bytes, bytes]]:
        name, namespace = f"gang-{number:05d}".encode(), bodies.team(number % self.teams).encode()
        assert len(namespace) == len(CONTROLLER_NAMESPACE), "the encodings have lengths"
        uids = [(uid, f"{number:08x}".encode() + uid[8:]) for uid in self._uids]
        for key, value in self._original.items():
            copied = value
            here = ((ORIGINAL.encode(), name), (CONTROLLER_NAMESPACE.encode(), namespace))
            for old, new in (*here, *uids):
                copied = copied.replace(old, new)
            for old, new in here:
                key = key.replace(old, new)
            yield key, copied

    async def _wait_until_complete(self, jobs: int) -> int:
        """Wait until the API server lists all objects. Returns the number of pods."""
        async with self.server.session() as session:
            count = 0
            for path, least in ((JOBS, jobs), (PODS, jobs * self.gang)):
                end = time.monotonic() + 300
                while (count := await _count(session, path)) < least:
                    if time.monotonic() > end:
                        raise RuntimeError(f"{path} has {count} objects, not {least}")
            return count


def _uids(values: Iterable[bytes]) -> set[bytes]:
    return {uid for value in values for uid in _UID.findall(value)}


async def _count(session: aiohttp.ClientSession, path: str) -> int:
    async with session.get(path, params={"limit": "1"}) as answer:
        if answer.status != 200:
            return 0
        listed = msgspec.json.decode(await answer.read())
        return len(listed["items"]) + int(listed["metadata"].get("remainingItemCount", 0))


async def _one_gang(server: Server, port: int, gang: int) -> None:
    """Create the job to copy, and wait until it is idle."""
    await ready(port)
    async with server.session() as session:
        await create(session, CONTROLLER_NAMESPACE, ORIGINAL, gang)
        async with asyncio.timeout(60):
            while True:
                async with session.get(ORIGINAL_PATH) as answer:
                    job = msgspec.json.decode(await answer.read())
                if job.get("status", {}).get("workersStatus") == f"{gang}/{gang} ready":
                    return
                await asyncio.sleep(0.1)


@contextmanager
def crowd(part: str, gang: int, teams: int) -> Iterator[Crowd]:
    """A cluster with one running job of `gang` pods, which can be copied to `teams` namespaces."""
    say(f"{part}: starts an API server, and one gang of {gang} to be copied")
    crowd_cluster = cluster(part, scheduler=True)
    with crowd_cluster:
        server, port = prepare(crowd_cluster), free_port()
        uvloop.run(create_teams(server, teams))
        with kwok.playing(crowd_cluster), controller(crowd_cluster.kubeconfig, port) as process:
            uvloop.run(_one_gang(server, port, gang))
            settled(process.pid)
        for component in ("kube-controller-manager", "kube-scheduler"):
            crowd_cluster.stop(component)
        yield Crowd(crowd_cluster, name_of(part), server, gang, teams)
