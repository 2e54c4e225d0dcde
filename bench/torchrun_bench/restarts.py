"""Gang restarts: from the first failed pod to all pods of the new gang.

Nodes and pods are kwok's; API server, Job controller, scheduler and the controller are real. Each
job is restarted once, for the first restart of a job is the one without a delay. All times are
when the events came by the bench's own watches, on its monotonic clock.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import aiohttp
import msgspec

from torchrun_api import names
from torchrun_api.json import JsonObject
from torchrun_bench.http import Server, events, send
from torchrun_bench.processes import CONTROLLER_NAMESPACE, ready, running
from torchrun_bench.report import Row, percentile
from torchrun_cluster import LocalCluster, Size, binaries

STAGES = Path(__file__).with_name("kwok.yaml")
NODES = 16
GANG = 8
FAILING = 3  # index of the pod that fails
WARM_UP = 5
JSON, MERGE = "application/json", "application/merge-patch+json"
JOBS_PATH = f"/apis/torchrun.ai/v1alpha1/namespaces/{CONTROLLER_NAMESPACE}/torchrunjobs"
PODS_PATH = f"/api/v1/namespaces/{CONTROLLER_NAMESPACE}/pods"
CHILDREN_PATH = f"/apis/batch/v1/namespaces/{CONTROLLER_NAMESPACE}/jobs"
FAILED = {
    "phase": "Failed",
    "containerStatuses": [
        {
            "name": "trainer",
            "image": "bench/none",
            "imageID": "bench/none",
            "ready": False,
            "restartCount": 0,
            "state": {"terminated": {"exitCode": 1, "reason": "Error"}},
        }
    ],
}


class Restart(msgspec.Struct, frozen=True):
    """Seconds from the first failed pod of a gang to what followed it."""

    child_job: float
    first_pod: float
    all_pods: float
    ranks: float
    running: float


def cluster(name: str) -> LocalCluster:
    """A control plane whose Job controller is not held up by its own client's limits."""
    limits = ["--kube-api-qps=1000", "--kube-api-burst=2000"]
    return LocalCluster(
        name=name,
        size=Size.CONTROL_PLANE,
        scheduler=True,
        extra_args={"kube-controller-manager": limits},
    )


def kwok(on: LocalCluster) -> AbstractContextManager[object]:
    """NODES nodes whose pods run at once."""
    node = {"apiVersion": "v1", "kind": "Node"}
    nodes = [{**node, "metadata": {"name": f"node-{number}"}} for number in range(NODES)]
    listed = {"apiVersion": "v1", "kind": "List", "items": nodes}
    on.kubectl("apply", "-f", "-", stdin=msgspec.json.encode(listed).decode())
    program = binaries.ensure(["kwok"])["kwok"]
    files = ["--kubeconfig", str(on.kubeconfig), "--config", str(STAGES)]
    # Above ERROR: that the Job controller was first to remove a pod is no news.
    return running([str(program), "--manage-all-nodes", "-v", "12", *files])


class Watched:
    """What the watches of one namespace have shown, with the second of the monotonic clock."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._changed = asyncio.Condition()
        self.jobs: dict[str, tuple[str, int]] = {}
        self.children: dict[str, float] = {}
        self.pods: dict[tuple[str, str], dict[str, float]] = {}
        self.started: dict[tuple[str, str], dict[str, float]] = {}
        self.failed: dict[str, float] = {}
        self.running: dict[tuple[str, int], float] = {}

    async def follow(self, path: str, note: Callable[[JsonObject], None]) -> None:
        """Note every object that comes by; run until cancelled."""
        async for kind, found in events(self._session, path):
            if kind in ("ADDED", "MODIFIED"):
                note(found)
                async with self._changed:
                    self._changed.notify_all()

    def note_job(self, job: JsonObject) -> None:
        """Phase and attempt of a TorchrunJob."""
        status = _part(job, "status")
        attempt = status.get("attempt", 0)
        assert isinstance(attempt, int)
        if status.get("phase") == "Running":
            self.running.setdefault((_name(job), attempt), time.monotonic())

    def note_child(self, child: JsonObject) -> None:
        """A child Job."""
        self.children.setdefault(_name(child), time.monotonic())

    def note_pod(self, pod: JsonObject) -> None:
        """A worker: when it was first seen, and its failure."""
        labels = _part(_part(pod, "metadata"), "labels")
        job, attempt = str(labels[names.JOB_LABEL]), str(labels[names.ATTEMPT_LABEL])
        self.pods.setdefault((job, attempt), {}).setdefault(_name(pod), time.monotonic())
        phase = _part(pod, "status").get("phase")
        if phase == "Failed":
            self.failed.setdefault(job, time.monotonic())
        if phase == "Running" and names.START in _part(_part(pod, "metadata"), "annotations"):
            self.started.setdefault((job, attempt), {}).setdefault(_name(pod), time.monotonic())

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for what the watches bring, for up to a minute."""
        async with asyncio.timeout(60), self._changed:
            await self._changed.wait_for(holds)

    async def restart(self, job: str) -> Restart:
        """A job from its creation to the second gang that runs."""
        spec = {"jobQueue": "bench", "numNodes": GANG, "command": "python train.py"}
        body = {
            "apiVersion": "torchrun.ai/v1alpha1",
            "kind": "TorchrunJob",
            "metadata": {"name": job},
            "spec": spec,
        }
        await send(self._session, "POST", JOBS_PATH, msgspec.json.encode(body), JSON)
        await self.until(lambda: (job, 0) in self.running)
        victim = sorted(self.pods[job, "0"])[FAILING]
        failed = msgspec.json.encode({"status": FAILED})
        await send(self._session, "PATCH", f"{PODS_PATH}/{victim}/status", failed, MERGE)
        await self.until(lambda: (job, 1) in self.running)
        pods = sorted(self.pods[job, "1"].values())
        assert len(pods) == GANG, f"{job}: {len(pods)} pods in the second gang"
        began = self.failed[job]
        await send(self._session, "DELETE", f"{JOBS_PATH}/{job}", b"", JSON)
        return Restart(
            child_job=self.children[names.child_job(job, 1)] - began,
            first_pod=pods[0] - began,
            all_pods=pods[-1] - began,
            ranks=max(self.started[job, "1"].values()) - began,
            running=self.running[job, 1] - began,
        )


async def measure(server: Server, port: int, restarts: int) -> list[Row]:
    """One restart after the other."""
    async with server.session() as session, asyncio.TaskGroup() as tasks:
        await ready(port)
        watched = Watched(session)
        followers = [
            tasks.create_task(watched.follow(path, note))
            for path, note in (
                (JOBS_PATH, watched.note_job),
                (CHILDREN_PATH, watched.note_child),
                (PODS_PATH, watched.note_pod),
            )
        ]
        seen = [await watched.restart(f"gang-{number}") for number in range(WARM_UP + restarts)]
        for follower in followers:
            follower.cancel()
    return rows(seen[WARM_UP:])


def rows(seen: list[Restart]) -> list[Row]:
    """The figures, those with a target first."""
    made = []
    for percent, most in ((50, 0.4), (99, 1.0)):
        value = percentile([restart.all_pods for restart in seen], percent)
        what = (
            f"gang of {GANG}, first failed pod to all pods of the next, p{percent} of {len(seen)}"
        )
        made.append(Row(what, "s", round(value, 3), None, None, f"<= {most}", value <= most))
    for part, what in (
        ("child_job", "of which until the new Job is seen"),
        ("first_pod", "until the first new pod is seen"),
        ("ranks", "until every rank may start"),
        ("running", "until the phase is Running again"),
    ):
        value = percentile([getattr(restart, part) for restart in seen], 50)
        made.append(Row(f"{what}, p50", "s", round(value, 3), None, None, "", True))
    return made


def _part(value: JsonObject, field: str) -> JsonObject:
    found = value.get(field, {})
    assert isinstance(found, dict)
    return found


def _name(value: JsonObject) -> str:
    return str(_part(value, "metadata")["name"])
