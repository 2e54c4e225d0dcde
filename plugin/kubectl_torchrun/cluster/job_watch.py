"""The last known state of a job and its pods, kept up to date by two watches."""

import anyio

from kubectl_torchrun.cluster.client import Api
from kubectl_torchrun.cluster.pods import belongs_to
from kubectl_torchrun.cluster.slices import JOBS, PODS, JobSlice
from torchrun_api import names
from torchrun_api.kinds.core import Pod


class Changes:
    """Changes of something, for tasks that wait for them."""

    def __init__(self) -> None:
        self._tick = anyio.Event()

    async def next_change(self, seconds: float) -> bool:
        """Wait for the next change, at most `seconds`; whether there was one."""
        tick = self._tick
        with anyio.move_on_after(seconds):
            await tick.wait()
            return True
        return False

    def wake(self) -> None:
        """Wake the tasks that wait for a change."""
        self._tick.set()
        self._tick = anyio.Event()


class JobState(Changes):
    """The last known state of a job, and its changes. job: None before the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.job: JobSlice | None = None


class JobWatch(JobState):
    """The last state of one job. Start `run` in a task; `next_change` waits for a change.

    reloads: the job has a workspace and gets another one. uid: of the job; default: that of the
    first one that is read. has_read: whether the job was read. pods: those of this job.
    After its deletion, `job` stays None, even if there is another job of the same name.
    The two watches are independent: a job may have ended before its pods show it.
    """

    def __init__(self, api: Api, name: str, *, reloads: bool = False, uid: str = "") -> None:
        super().__init__()
        self.name = name
        self.reloads = reloads
        self.has_read = False
        self.pods: dict[str, Pod] = {}
        self._uid = uid
        self._listed: dict[str, Pod] = {}  # also those of a deleted job of the same name
        self._api = api
        self._selector = {"labelSelector": f"{names.JOB_LABEL}={name}"}

    async def run(self) -> None:
        """Watch until cancelled. Raises ApiError and Unreachable as `Api.watch` does."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch_job)
            tasks.start_soon(self._watch_pods)

    def of_component(self, component: str) -> list[Pod]:
        """The sync pods or the worker pods."""
        return [pod for pod in self.pods.values() if pod.metadata.labels.component == component]

    async def _watch_job(self) -> None:
        query = {"fieldSelector": f"metadata.name={self.name}"}
        async for jobs in self._api.watch(JOBS, query):
            self.show_job(next(iter(jobs.values()), None))

    async def _watch_pods(self) -> None:
        async for pods in self._api.watch(PODS, self._selector, skips_unreadable=True):
            self.show_pods({name: pod for (_, name), pod in pods.items()})

    async def refresh_pods(self) -> None:
        """List the pods, because the watch may be behind."""
        listed = await self._api.list(PODS, self._selector)
        self.show_pods({pod.metadata.name: pod for pod in listed.items})

    def show_job(self, job: JobSlice | None) -> None:
        """Set the state of the job, and wake waiting tasks."""
        self.has_read = True
        if job is not None:
            if not self._uid:
                self._uid = job.metadata.uid
                self._select_pods()
            if job.metadata.uid != self._uid:
                job = None
        self.job = job
        self.wake()

    def show_pods(self, pods: dict[str, Pod]) -> None:
        """Set the state of all pods, and wake waiting tasks."""
        self._listed = pods
        self._select_pods()
        self.wake()

    def _select_pods(self) -> None:
        uid = self._uid
        self.pods = {n: pod for n, pod in self._listed.items() if not uid or belongs_to(pod, uid)}
