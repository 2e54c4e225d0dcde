"""Run one job of the self-test: create, upload, watch, disturb, delete. Its log is recorded."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import anyio

from kubectl_torchrun.cluster.client import Api
from kubectl_torchrun.cluster.job_watch import JobWatch
from kubectl_torchrun.cluster.lifecycle import delete_job
from kubectl_torchrun.cluster.narrator import Narrator
from kubectl_torchrun.cluster.pods import list_running
from kubectl_torchrun.cluster.session import Cluster
from kubectl_torchrun.cluster.slices import JOBS, PODS, JobStatusSlice, NetworkSlice
from kubectl_torchrun.errors import Problem
from kubectl_torchrun.logs.follow import follow
from kubectl_torchrun.logs.hung_stacks import stacks_in
from kubectl_torchrun.selftest.facts import HANGS_IN, JobRecord, RankFact, RankVersions, parse_event
from kubectl_torchrun.terminal import Bar, Display
from kubectl_torchrun.upload import job_manifest
from kubectl_torchrun.upload.cache import Workspace
from kubectl_torchrun.upload.deliver import deliver
from kubectl_torchrun.upload.job_manifest import Request
from kubectl_torchrun.upload.submission import create
from kubectl_torchrun.upload.upload_token import token_sha256, upload_token
from torchrun_api.json import JsonObject

START_SECONDS = 600.0  # for a queue, free machines and the image
RUN_SECONDS = 240.0  # from the first rank to the end
_SUSPEND_SECONDS = 120.0
_HANG_SECONDS = 10  # the least that the API allows
_LINES = 5000  # of the log of one node
_TICK_SECONDS = 1.0


class JobSize(NamedTuple):
    """Size of the jobs. gpus: of each node; None: those of the queue."""

    queue: str
    nodes: int
    gpus: int | None = None


class JobRecorder(Display):
    """A display that records the log of the ranks, and shows nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[RankFact] = []
        self.versions = RankVersions()
        self.lines: dict[int, deque[bytes]] = {}

    def log(self, rank: int, line: bytes, *, prefix: bool = True) -> None:
        """Record a line of a node."""
        self.lines.setdefault(rank, deque(maxlen=_LINES)).append(line)
        event, versions = parse_event(line, time.monotonic())
        if event is not None:
            self.events.append(event)
        self.versions = versions or self.versions

    def note(self, text: str) -> None:
        """Nothing."""

    def transition(self, phase: str, text: str) -> None:
        """Nothing."""

    def waiting(self, phase: str, text: str, seconds: float) -> None:
        """Nothing."""

    @contextmanager
    def bar(self, label: str, total: int) -> Iterator[Bar]:
        """No bar."""
        yield Bar(label, total, None)


def manifest(check: str, settings: JobSize) -> JsonObject:
    """The TorchrunJob of a check, which ends and is deleted even if this program dies."""
    reliability: JsonObject = {
        "maxRestarts": 3,
        "activeDeadlineSeconds": int(RUN_SECONDS) + 60,
        "ttlSecondsAfterFinished": 600,
    }
    if check == "hang":
        reliability["hangTimeoutSeconds"] = _HANG_SECONDS
    spec: JsonObject = {
        "numNodes": settings.nodes,
        "command": f"python train.py {check}",
        "reliability": reliability,
        "volumes": {"workspace": {"source": "zip"}, "checkpoints": {"retain": False}},
    }
    if settings.gpus is not None:
        spec["nodeResources"] = {"gpus": settings.gpus}
        ranks: JsonObject = {"nprocPerNode": max(settings.gpus, 1)}
        spec["distributed"] = ranks if settings.gpus else {**ranks, "backend": "gloo"}
    return {
        "apiVersion": "torchrun.ai/v1alpha1",
        "kind": "TorchrunJob",
        "metadata": {},
        "spec": spec,
    }


class SelftestJob:
    """One job, from its creation to its deletion. `interrupted`: by Ctrl-C."""

    def __init__(
        self,
        cluster: Cluster,
        check: str,
        settings: JobSize,
        workspace: Workspace,
        terminal: Display,
        deadline: float,
    ) -> None:
        self.interrupted = False
        self._name = job_manifest.generated_name(f"selftest-{check}")
        self._cluster = cluster
        self._check = check
        self._workspace = workspace
        self._terminal = terminal
        self._deadline = deadline
        self._token = upload_token(cluster.where, self._name)
        request = Request(self._name, settings.queue, "", manifest=manifest(check, settings))
        self._body = job_manifest.build(
            request,
            cluster.namespace,
            workspace.manifest.sha256,
            token=token_sha256(self._token),
        )
        self._log = JobRecorder()
        self._acts: dict[str, float] = {}
        self._status = JobStatusSlice()
        self._network: tuple[NetworkSlice, ...] = ()
        self._slow = ""
        self._why = ""

    def run(self) -> JobRecord:
        """Run it and delete it. A problem is printed, and ends it."""
        try:
            self._cluster.run(self._work)
        except KeyboardInterrupt:
            self._terminal.interrupted()
            self.interrupted, self._why = True, "stopped by Ctrl-C"
        except Problem as problem:
            self._terminal.at_rest()
            self._terminal.note(str(problem))
            self._why = self._why or "the plugin has stopped with an error"
        finally:
            self._delete()
        stacks = [
            stack
            for node, lines in self._log.lines.items()
            for stack in stacks_in(lines, str(node))
            if stack.is_rank and stack.rank is not None
        ]
        return JobRecord(
            tuple(self._log.events),
            self._log.versions,
            self._status,
            self._network,
            self._slow,
            self._acts,
            frozenset(s.rank for s in stacks if s.rank is not None and HANGS_IN in s.stack),
            len(stacks),
            self._why,
        )

    def _delete(self) -> None:
        """Delete the job, if it was created."""
        try:
            self._cluster.run(lambda api: delete_job(api, self._name))
        except (Problem, KeyboardInterrupt) as error:
            how = self._cluster.command(f"torchrun cancel {self._name}")
            self._terminal.note(f"Job {self._name} is not deleted: {error}\nDelete it:\n  {how}")

    async def _work(self, api: Api) -> None:
        await create(api, self._body)
        job_watch = JobWatch(api, self._name)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(job_watch.run)
            tasks.start_soon(self._limit, job_watch, tasks.cancel_scope)
            await deliver(
                api,
                job_watch,
                self._log,
                self._workspace,
                pod_wait=START_SECONDS,
                token=self._token,
            )
            tasks.start_soon(self._disturb, api, job_watch)
            await follow(api, job_watch, self._log, Narrator(job_watch, self._log))
            self._look(job_watch)
            tasks.cancel_scope.cancel()

    def _look(self, job_watch: JobWatch) -> None:
        """Keep what the status says now."""
        if job_watch.job is None:
            return
        self._status = status = job_watch.job.status
        self._network = status.network or self._network
        for condition in status.conditions:
            if condition.type == "SlowNetwork" and condition.status == "True":
                self._slow = condition.reason

    async def _limit(self, job_watch: JobWatch, scope: anyio.CancelScope) -> None:
        """Show what the job waits for, and end the wait in time."""
        since = time.monotonic()
        started = 0.0
        while not self._why:
            self._look(job_watch)
            now = time.monotonic()
            started = started or (now if self._log.events else 0.0)
            status = self._status
            is_quiet = started or status.reason == "WaitingForUpload"
            words = (self._check, *(() if is_quiet else (status.reason, status.message)))
            text = ": ".join(word for word in words if word)
            self._terminal.waiting(status.phase or "New", text, now - since)
            if now > self._deadline:
                self._why = "the time of the self-test is over"
            elif not started and now - since > START_SECONDS:
                self._why = f"no rank has started within {START_SECONDS:.0f} s"
            elif started and now - started > RUN_SECONDS:
                self._why = f"the job has not ended within {RUN_SECONDS:.0f} s"
            await job_watch.next_change(_TICK_SECONDS)
        self._terminal.at_rest()
        self._terminal.note(
            f"Gave up on {self._check}: {self._why}. {self._status.reason}: {self._status.message}"
        )
        scope.cancel()

    async def _disturb(self, api: Api, job_watch: JobWatch) -> None:
        """Delete a pod, or suspend and resume the job, once the ranks are ready for it."""
        if self._check not in ("delete", "stop"):
            return
        await self._until(job_watch, lambda: any(e.kind == "ready" for e in self._log.events))
        if self._check == "delete":
            assert job_watch.job is not None
            pods = await list_running(api, job_watch.job)
            if pods:
                self._acts["deleted"] = time.monotonic()
                await api.delete(PODS, pods[-1].metadata.name)
            return
        self._acts["suspended"] = time.monotonic()
        await api.merge(JOBS, self._name, b'{"spec":{"suspend":true}}')
        with anyio.move_on_after(_SUSPEND_SECONDS):
            await self._until(job_watch, lambda: self._status.phase == "Suspended")
        self._acts["resumed"] = time.monotonic()
        await api.merge(JOBS, self._name, b'{"spec":{"suspend":false}}')

    async def _until(self, job_watch: JobWatch, holds: Callable[[], bool]) -> None:
        while not holds():
            await job_watch.next_change(_TICK_SECONDS / 5)
            self._look(job_watch)
