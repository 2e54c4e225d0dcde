"""A stream of jobs. The script of each job decides how it ends."""

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import httpx

from integration.background import repeating
from integration.team import TERMINAL, Team, pod_status, trains

TICK = 0.5  # seconds between two polls of the cluster
LONGEST = 6.0  # maximum seconds that a gang works
SHOWN = 5.0  # seconds until the user deletes a finished job
MOST = 40  # jobs of a namespace at a time; more would make memory incomparable
NARROW = 4  # the quota of the queue `narrow`, in jobs
SUCCEEDED, FAILED = "Succeeded", "Failed"


class Script(NamedTuple):
    """How a job ends: `failures` of its gangs fail; `end` is a phase, or "deleted"."""

    nodes: int
    failures: int
    end: str = SUCCEEDED
    pauses: bool = False
    queue: str = "research"

    @property
    def restarts(self) -> int:
        """The number of restarts. A failing job uses all its restarts."""
        return self.failures - (self.end == FAILED)


def drawn(chance: random.Random) -> Script:
    """Draw a script. Most jobs succeed."""
    nodes, queue = (
        chance.choice((1, 1, 2)),
        chance.choice(("research", "research", "research", "narrow")),
    )
    luck = chance.random()
    if luck < 0.1:
        return Script(nodes, 2, FAILED, queue=queue)
    if luck < 0.2:
        return Script(nodes, 0, "deleted", queue=queue)
    if luck < 0.3:
        return Script(nodes, 0, pauses=True, queue=queue)
    return Script(nodes, chance.choice((0, 0, 0, 1, 2)), queue=queue)


class Life:
    """The users and kubelets of a namespace. Both retry failed requests.

    Pods are bound to no node. Their containers run as soon as the pods are visible.
    """

    def __init__(self, team: Team, chance: random.Random, pause: float) -> None:
        self.team = team
        self.scripts: dict[str, Script] = {}
        self.done: dict[str, Script] = {}  # finished and deleted jobs, with or without violations
        self.wrong: list[str] = []
        self.arrivals = threading.Event()
        self.arrivals.set()
        self._chance, self._pause = chance, pause
        self._next = time.monotonic()
        self._came: dict[str, float] = {}
        self._made: set[str] = set()
        self._ended: dict[str, float] = {}
        self._due: dict[tuple[str, int], float] = {}
        self._actions: set[tuple[str, int] | tuple[str, str]] = set()

    @contextmanager
    def going_on(self) -> Iterator["Life"]:
        """Until the end of the block."""
        with repeating(self._try, TICK):
            yield self

    def under_way(self) -> dict[str, float]:
        """Unfinished jobs with their ages in seconds."""
        now = time.monotonic()
        return {n: now - came for n, came in list(self._came.items()) if n not in self.done}

    def _try(self) -> None:
        with suppress(httpx.HTTPError):  # the API server is unavailable or busy
            try:
                self._play()
            except (KeyError, ValueError, AssertionError) as error:
                self.wrong.append(f"the script could not be played: {error!r}")

    def _play(self) -> None:
        if self.arrivals.is_set() and time.monotonic() >= self._next:
            if len(self.under_way()) < MOST:
                name = f"job-{len(self.scripts)}"
                self.scripts[name], self._came[name] = drawn(self._chance), time.monotonic()
            self._next += self._chance.expovariate(1 / self._pause)
        jobs = {
            job["metadata"]["name"]: job
            for job in self.team.api.items(f"{self.team.group}/torchrunjobs")
        }
        for name in list(self.under_way()):
            if name not in self._made:
                self._submit(name, self.scripts[name])
            elif name in jobs:
                self._user(name, jobs[name])
            elif (name, "deleted") in self._actions:
                self.done[name] = self.scripts[name]
            else:
                self.wrong.append(f"{name} is gone, and nobody deleted it")
                self.done[name] = self.scripts[name]
        for name, (attempt, pods) in self.team.newest_gangs().items():
            self._kubelet(name, attempt, pods)

    def _submit(self, name: str, script: Script) -> None:
        body = self.team.body(
            name,
            jobQueue=script.queue,
            numNodes=script.nodes,
            reliability={"maxRestarts": 1 if script.end == FAILED else 5},
        )
        answer = self.team.api.client.post(f"{self.team.group}/torchrunjobs", json=body)
        if answer.status_code != 409:  # an earlier try was processed
            answer.raise_for_status()
        self._made.add(name)

    def _user(self, name: str, job: Any) -> None:
        script, phase = self.scripts[name], job.get("status", {}).get("phase", "")
        suspended = job["spec"].get("suspend", False)
        # Read the spec, because a write may have succeeded without a response.
        if suspended:
            self._actions.add((name, "paused"))
        elif (name, "paused") in self._actions:
            self._actions.add((name, "resumed"))
        if script.end == "deleted" and phase == "Running":
            self._delete(name, job)
        elif script.pauses and phase == "Running" and (name, "paused") not in self._actions:
            self._suspend(name, True)
        elif suspended and phase == "Suspended":
            self._suspend(name, False)
        elif phase in TERMINAL:
            if name not in self._ended:
                self._ended[name] = time.monotonic()
                self._judge(name, script, job["status"])
            if time.monotonic() - self._ended[name] > SHOWN:
                self._delete(name, job)

    def _delete(self, name: str, job: Any) -> None:
        self._actions.add((name, "deleted"))
        if "deletionTimestamp" not in job["metadata"]:
            answer = self.team.api.client.delete(f"{self.team.group}/torchrunjobs/{name}")
            if answer.status_code != 404:
                answer.raise_for_status()

    def _suspend(self, name: str, suspend: bool) -> None:
        self._patch(f"{self.team.group}/torchrunjobs/{name}", {"spec": {"suspend": suspend}})

    def _judge(self, name: str, script: Script, status: Any) -> None:
        result = (status["phase"], status.get("restarts", 0), status.get("disruptions", 0))
        if result != (script.end, script.restarts, 0):
            self.wrong.append(f"{name}: {script} ended as {result}: {status.get('message')}")

    def _kubelet(self, name: str, attempt: int, pods: list[Any]) -> None:
        script, gang = self.scripts[name], (name, attempt)
        fails = attempt < script.failures
        for pod in pods:
            if pod["status"].get("phase") == "Pending":
                self._pod(pod, "Running")
            elif gang in self._actions and not fails and pod["status"]["phase"] == "Running":
                self._pod(pod, SUCCEEDED)  # retry after a failed request
        if (
            len(pods) < script.nodes
            or gang in self._actions
            or not all(trains(pod, pods) for pod in pods)
        ):
            return
        if script.end == "deleted" or (script.pauses and (name, "resumed") not in self._actions):
            return
        due = self._due.setdefault(gang, time.monotonic() + self._chance.random() * LONGEST)
        if time.monotonic() < due:
            return
        if fails:
            self._pod(pods[0], FAILED)
        self._actions.add(gang)
        for pod in () if fails else pods:
            self._pod(pod, SUCCEEDED)

    def _pod(self, pod: Any, phase: str) -> None:
        name = pod["metadata"]["name"]
        self._patch(f"{self.team.core}/pods/{name}/status", {"status": pod_status(name, phase)})

    def _patch(self, path: str, body: object) -> None:
        kind = {"Content-Type": "application/merge-patch+json"}
        answer = self.team.api.client.patch(path, json=body, headers=kind)
        if answer.status_code != 404:
            answer.raise_for_status()
