"""The logs of all nodes of a run, followed to its end."""

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from types import MappingProxyType

import anyio
from anyio.abc import TaskGroup

from kubectl_torchrun.cluster.client import Api, RequestError, Unreachable
from kubectl_torchrun.cluster.job_watch import JobWatch
from kubectl_torchrun.cluster.narrator import Narrator
from kubectl_torchrun.cluster.pods import end_of, has_started, rank_of
from kubectl_torchrun.cluster.repeated_failure import RepeatedFailure, find_repeated_failure
from kubectl_torchrun.cluster.slices import JOBS
from kubectl_torchrun.errors import REPEATED_FAILURE, RUN_FAILED, SUCCEEDED
from kubectl_torchrun.logs.streams import ALL, Cursor, NodeLines, View, Window
from kubectl_torchrun.terminal import Display
from torchrun_api.kinds.core import Pod
from torchrun_api.names import TRAINER_CONTAINER, WORKER

MOST_STREAMS = 64
_LAST_LINES_SECONDS = 15.0
_TICK_SECONDS = 1.0
_REREAD_SECONDS = 0.2


async def follow(
    api: Api,
    job_watch: JobWatch,
    terminal: Display,
    narrator: Narrator,
    view: View = ALL,
    cursors: Mapping[str, NodeLines] = MappingProxyType({}),
    *,
    stop_on_repeated_failure: bool = False,
) -> int:
    """Print the logs of the nodes in the view until the run ends; the exit code of its result.

    stop_on_repeated_failure: suspend a job whose attempts repeat the same failure, and return
    REPEATED_FAILURE.

    Prints the logs of every attempt, each from its beginning or from its cursor (by the UID of the
    pod). Reads at most MOST_STREAMS pods at a time, lowest node first.
    """
    async with anyio.create_task_group() as tasks:
        streams = _Streams(api, job_watch, terminal, view, cursors, tasks)
        tasks.start_soon(streams.window.run)
        repeated = None
        while not job_watch.has_read or (job_watch.job is not None and not job_watch.job.has_ended):
            if stop_on_repeated_failure and job_watch.job is not None:
                repeated = find_repeated_failure(job_watch.job)
                if repeated is not None:
                    break
            streams.start()
            await job_watch.next_change(_TICK_SECONDS)
        with anyio.move_on_after(_LAST_LINES_SECONDS):
            with suppress(RequestError, Unreachable):  # else use the pods of the watch
                await job_watch.refresh_pods()
            streams.start()
            while streams.open:
                await job_watch.next_change(0.05)
        tasks.cancel_scope.cancel()
    narrator.catch_up()
    if repeated is not None:
        return await _suspend(api, job_watch, terminal, repeated)
    return _result(job_watch, terminal)


async def _suspend(
    api: Api, job_watch: JobWatch, terminal: Display, repeated: RepeatedFailure
) -> int:
    """Suspend the job, so that it does not use nodes for further attempts; the exit code."""
    await api.merge(JOBS, job_watch.name, b'{"spec":{"suspend":true}}')
    terminal.at_rest()
    terminal.note(f"Suspended job {job_watch.name}. {repeated.describe()}")
    return REPEATED_FAILURE


def _result(job_watch: JobWatch, terminal: Display) -> int:
    terminal.at_rest()
    job = job_watch.job
    if job is None:
        terminal.note(f"Job {job_watch.name} was deleted.")
        return RUN_FAILED
    if job.status.phase == "Succeeded":
        return SUCCEEDED
    failure = job.status.last_failure
    if failure is not None and failure.message and failure.message not in job.status.message:
        where = "" if failure.rank is None else f"rank {failure.rank}"
        where = ", ".join(part for part in (where, failure.node) if part)
        code = "" if failure.exit_code is None else f", exit code {failure.exit_code}"
        at = f" ({where}{code})" if where or code else ""
        terminal.note(f"Root cause{at}: {failure.reason}: {failure.message}")
    return RUN_FAILED


class _Streams:
    """One task for each log; `open` counts the running tasks."""

    def __init__(
        self,
        api: Api,
        job_watch: JobWatch,
        terminal: Display,
        view: View,
        cursors: Mapping[str, NodeLines],
        tasks: TaskGroup,
    ) -> None:
        self.open = 0
        self.window = Window(partial(terminal.log, prefix=view.line_format.prefix))
        self._api = api
        self._job_watch = job_watch
        self._terminal = terminal
        self._view = view
        self._cursors = cursors
        self._tasks = tasks
        self._started: set[str] = set()
        self._limit_noted = False

    def start(self) -> None:
        """Start a task for every pod whose log has begun."""
        for pod in sorted(self._job_watch.of_component(WORKER), key=rank_of):
            if (
                pod.metadata.uid in self._started
                or not self._view.takes(rank_of(pod))
                or not has_started(pod, TRAINER_CONTAINER)
            ):
                continue
            if self.open >= MOST_STREAMS:
                self._note_limit()
                return
            self._started.add(pod.metadata.uid)
            self.open += 1
            self._tasks.start_soon(self._read, pod)

    def _note_limit(self) -> None:
        if not self._limit_noted:
            self._limit_noted = True
            self._terminal.note(
                f"Reading only {MOST_STREAMS} nodes at a time. Select others with --node."
            )

    async def _read(self, pod: Pod) -> None:
        name, rank = pod.metadata.name, rank_of(pod)
        cursor = self._cursors.get(pod.metadata.uid)
        if cursor is None:
            cursor = self._view.fold(Cursor(self._api, name, self._view))
        failures = 0
        try:
            while True:
                has_ended = self._has_ended(pod)
                try:
                    async for line in cursor.read(follow=True, has_ended=has_ended):
                        failures = 0
                        if self._view.shows(rank, line):
                            text = self._view.line_format.format(cursor.stamp, line)
                            self.window.add(cursor.stamp, rank, text)
                    if has_ended:
                        return
                    failures = 0
                except Unreachable:
                    failures += 1
                except RequestError as error:
                    if error.status in (403, 404):
                        self._explain(rank, error)
                        return
                    failures += 1
                await anyio.sleep(
                    self._api.backoff.delay(failures) if failures else _REREAD_SECONDS
                )
        finally:
            self.open -= 1

    def _has_ended(self, pod: Pod) -> bool:
        latest = self._job_watch.pods.get(pod.metadata.name)
        if latest is None or latest.metadata.uid != pod.metadata.uid:
            return True
        return end_of(latest, TRAINER_CONTAINER) is not None

    def _explain(self, rank: int, error: RequestError) -> None:
        if error.status == 403:
            self._terminal.note(f"Cannot read the log of node {rank}: {error.message}")
