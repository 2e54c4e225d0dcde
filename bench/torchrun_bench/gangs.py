"""Gangs of one namespace from watches, and actions on them."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import aiohttp
import msgspec

from torchrun_api import names
from torchrun_api.json import JsonObject
from torchrun_bench.bodies import torchrun_job
from torchrun_bench.http import JSON, events, send

MERGE = "application/merge-patch+json"


FAILED: JsonObject = {
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


async def create(session: aiohttp.ClientSession, namespace: str, name: str, nodes: int = 1) -> None:
    """POST a job."""
    path = f"/apis/torchrun.ai/v1alpha1/namespaces/{namespace}/torchrunjobs"
    body = msgspec.json.encode(torchrun_job(name, nodes))
    await send(session, "POST", path, body, JSON)


class Gangs:
    """Jobs, child Jobs and pods of a namespace, with monotonic times."""

    def __init__(
        self, session: aiohttp.ClientSession, namespace: str, most_seconds: float = 60.0
    ) -> None:
        self._session = session
        self._most_seconds = most_seconds
        scope = f"namespaces/{namespace}"
        self.jobs_path = f"/apis/torchrun.ai/v1alpha1/{scope}/torchrunjobs"
        self._pods_path = f"/api/v1/{scope}/pods"
        self._children_path = f"/apis/batch/v1/{scope}/jobs"
        self._changed = asyncio.Condition()
        self.children: dict[str, float] = {}
        # By job and attempt, then by pod.
        self.pods: dict[tuple[str, str], dict[str, float]] = {}
        self.up: dict[tuple[str, str], dict[str, float]] = {}  # when its process runs
        self.started: dict[tuple[str, str], dict[str, float]] = {}  # when its rank may run
        self.failed: dict[str, float] = {}
        self.running: dict[tuple[str, int], float] = {}

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Watch until the end of the block."""
        watched = (
            (self.jobs_path, self._note_job),
            (self._children_path, self._note_child),
            (self._pods_path, self._note_pod),
        )
        async with asyncio.TaskGroup() as tasks:
            followers = []
            for path, note in watched:
                started = asyncio.Event()
                followers.append(tasks.create_task(self._follow(path, note, started)))
                await started.wait()
            yield
            for follower in followers:
                follower.cancel()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for a condition on the watched objects, for `most_seconds` at most."""
        async with asyncio.timeout(self._most_seconds), self._changed:
            await self._changed.wait_for(holds)

    async def end(self, pod: str, status: JsonObject) -> None:
        """End the containers of a pod."""
        body = msgspec.json.encode({"status": status})
        await send(self._session, "PATCH", f"{self._pods_path}/{pod}/status", body, MERGE)

    async def delete(self, job: str) -> None:
        """Delete a TorchrunJob."""
        await send(self._session, "DELETE", f"{self.jobs_path}/{job}", b"", JSON)

    async def _follow(
        self, path: str, note: Callable[[JsonObject], None], started: asyncio.Event
    ) -> None:
        async for kind, body in events(self._session, path, started.set):
            if kind in ("ADDED", "MODIFIED"):
                note(body)
                async with self._changed:
                    self._changed.notify_all()

    def _note_job(self, job: JsonObject) -> None:
        status = _part(job, "status")
        attempt = status.get("attempt", 0)
        assert isinstance(attempt, int)
        if status.get("phase") == "Running":
            self.running.setdefault((_name(job), attempt), time.monotonic())

    def _note_child(self, child: JsonObject) -> None:
        self.children.setdefault(_name(child), time.monotonic())

    def _note_pod(self, pod: JsonObject) -> None:
        now, metadata = time.monotonic(), _part(pod, "metadata")
        labels = _part(metadata, "labels")
        job, attempt = str(labels[names.JOB_LABEL]), str(labels[names.ATTEMPT_LABEL])
        self.pods.setdefault((job, attempt), {}).setdefault(_name(pod), now)
        phase = _part(pod, "status").get("phase")
        if phase == "Failed":
            self.failed.setdefault(job, now)
        if phase == "Running":
            self.up.setdefault((job, attempt), {}).setdefault(_name(pod), now)
            if names.START in _part(metadata, "annotations"):
                self.started.setdefault((job, attempt), {}).setdefault(_name(pod), now)


def _part(value: JsonObject, field: str) -> JsonObject:
    member = value.get(field, {})
    assert isinstance(member, dict)
    return member


def _name(value: JsonObject) -> str:
    return str(_part(value, "metadata")["name"])
