"""The view of one job: its status, its pods, and broken edits."""

import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime

import anyio

from kubectl_torchrun import output
from kubectl_torchrun.cluster.client import Api, RequestError, Unreachable
from kubectl_torchrun.cluster.job_watch import JobWatch
from kubectl_torchrun.cluster.kubectl import Target
from kubectl_torchrun.cluster.narrator import Narrator
from kubectl_torchrun.cluster.pods import attempt_of, list_pods, rank_of, trouble
from kubectl_torchrun.cluster.session import Cluster, session
from kubectl_torchrun.cluster.slices import JOBS, JobSlice
from kubectl_torchrun.cluster.summary import node_count, status_lines
from kubectl_torchrun.errors import DETACHED, RUN_FAILED, SUCCEEDED
from kubectl_torchrun.logs import broken_edits
from kubectl_torchrun.logs.progress_line import progress_line
from kubectl_torchrun.terminal import Display, has_colour, phase_style
from kubectl_torchrun.text import escape, join, style
from torchrun_api import names
from torchrun_api.kinds.core import Pod

_TICK_SECONDS = 1.0
_EDIT_SECONDS = 3.0


def show(target: Target, name: str, terminal: Display, *, watch: bool | None, form: str) -> int:
    """Print one view or keep it up to date; the exit code, the run's if watched to its end."""
    with session(target) as cluster:
        if form not in ("", output.WIDE):
            path = JOBS.path(cluster.namespace, name)
            output.write(output.without_noise(cluster.run(lambda api: api.read(path))), form)
            return 0
        job = cluster.run(lambda api: api.get(JOBS, name))
        live = sys.stdout.isatty() and terminal.live and not form
        if not (live if watch is None else watch):
            pods = cluster.run(lambda api: list_pods(api, job))
            edit = cluster.run(lambda api: _broken_edit(api, cluster, job, pods))
            wide = form == output.WIDE
            width = None if wide else output.screen_width()
            output.print_lines(view(job, pods, width, None, edit, wide=wide))
            return 0
        follow = _redraw if live else _print_changes
        try:
            return cluster.run(lambda api: follow(api, cluster, name, terminal))
        except KeyboardInterrupt:
            terminal.interrupted()
            terminal.note(f"The job continues. {cluster.command(f'torchrun status {name}')}")
            return DETACHED


async def _broken_edit(api: Api, cluster: Cluster, job: JobSlice, pods: Sequence[Pod]) -> str:
    """A line about an edit whose command failed; "" if there is none."""
    pod = await broken_edits.find_broken(api, job, pods)
    return broken_edits.describe(cluster, job, pod) if pod else ""


class _EditCheck:
    """Checks for a broken edit every few seconds; `text` is the line about it, or ""."""

    def __init__(self, api: Api, cluster: Cluster, job_watch: JobWatch) -> None:
        self.text = ""
        self._api = api
        self._cluster = cluster
        self._job_watch = job_watch

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            job = self._job_watch.job
            if job is not None:
                pods = list(self._job_watch.pods.values())
                self.text = await _broken_edit(self._api, self._cluster, job, pods)
            await anyio.sleep(_EDIT_SECONDS)


async def _print_changes(api: Api, cluster: Cluster, name: str, terminal: Display) -> int:
    job_watch = JobWatch(api, name)
    narrator = Narrator(job_watch, terminal)
    edits, printed = _EditCheck(api, cluster, job_watch), ""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(job_watch.run)
        tasks.start_soon(edits.run)
        while not _has_ended(job_watch):
            narrator.catch_up()
            if edits.text not in ("", printed):
                terminal.note(edits.text)
            printed = edits.text
            await job_watch.next_change(_TICK_SECONDS)
        narrator.catch_up()
        tasks.cancel_scope.cancel()
    return _exit_code(job_watch, terminal)


async def _redraw(api: Api, cluster: Cluster, name: str, terminal: Display) -> int:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    job_watch = JobWatch(api, name)
    edits = _EditCheck(api, cluster, job_watch)
    console = Console(highlight=False, markup=False, no_color=not has_colour(sys.stdout))

    def picture() -> Text:
        if job_watch.job is None:
            return Text(f"{name} ...")
        size = shutil.get_terminal_size()
        pods = list(job_watch.pods.values())
        lines = view(job_watch.job, pods, size.columns, size.lines - 1, edits.text)
        return Text.from_ansi(join(lines), no_wrap=True, overflow="ellipsis")

    with Live(picture(), console=console, auto_refresh=False) as drawing:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(job_watch.run)
            tasks.start_soon(edits.run)
            while not _has_ended(job_watch):
                drawing.update(picture(), refresh=True)
                await job_watch.next_change(_TICK_SECONDS)
            if job_watch.job is not None:
                with suppress(RequestError, Unreachable):  # else show the pods of the watch
                    await job_watch.refresh_pods()
                drawing.update(picture(), refresh=True)
            tasks.cancel_scope.cancel()
    return _exit_code(job_watch, terminal)


def _has_ended(job_watch: JobWatch) -> bool:
    return job_watch.has_read and (job_watch.job is None or job_watch.job.has_ended)


def _exit_code(job_watch: JobWatch, terminal: Display) -> int:
    terminal.at_rest()
    if job_watch.job is None:
        terminal.note(f"Job {job_watch.name} was deleted.")
        return RUN_FAILED
    return SUCCEEDED if job_watch.job.status.phase == "Succeeded" else RUN_FAILED


def view(
    job: JobSlice,
    pods: Sequence[Pod],
    width: int | None,
    height: int | None,
    edit: str = "",
    *,
    wide: bool = False,
) -> list[str]:
    """The lines of one view, at most `height`, with styles that `echo` removes without a terminal.

    edit: a line about an edit whose command failed, or "". wide: with all columns of pods.
    """
    status, now = job.status, datetime.now(UTC)
    head = (
        f"{job.metadata.name}   queue {job.spec.job_queue}   nodes {node_count(job)}"
        + (f" ({status.gpus} GPUs)" if status.gpus else "")
        + f"   age {output.age(job.metadata.creation_timestamp, now)}"
    )
    _, *details = status_lines(job)
    details += [f"  {edit}"] if edit else []
    phase = (status.phase or "New").replace("\n", " ")
    workers = status.workers_status.replace("\n", " ")
    headline = output.cut(escape(f"{phase}   {workers}".rstrip()), width)
    phase_text = headline[: len(escape(phase))]
    lines: list[str] = [
        output.cut(escape(head.replace("\n", " ")), width),
        style(phase_text, **phase_style(phase)) + headline[len(phase_text) :],
    ]
    if status.progress is not None:
        lines.append(output.cut(progress_line(status, width), width))
    for line in details:
        lines += _wrap(line, width)
    table = pod_table(pods, width, wide=wide)
    if table:
        lines.append("")
        room = max(height - len(lines) - 1, 2) if height else len(table)
        lines += table[:room]
        if len(table) > room:
            lines.append(f"... and {len(table) - room} more pods")
    return lines[:height] if height else lines


def pod_table(pods: Sequence[Pod], width: int | None, *, wide: bool = False) -> list[str]:
    """A table of the latest gang and its helper pods; pods with problems first. wide: with IPs."""
    newest = max(map(attempt_of, pods), default=0)
    latest = [
        pod
        for pod in pods
        if pod.metadata.labels.component != names.WORKER or attempt_of(pod) == newest
    ]
    if not latest:
        return []
    rows = [
        [
            pod.metadata.name,
            pod.spec.node_name or "-",
            "Terminating" if pod.metadata.deletion_timestamp else pod.status.phase or "-",
            output.age(pod.metadata.creation_timestamp),
            *([pod.status.pod_ip or "-"] if wide else []),
            trouble(pod),
        ]
        for pod in sorted(latest, key=_sort_key)
    ]
    head = ("POD", "MACHINE", "PHASE", "AGE", *(["IP"] if wide else []), "REASON")
    return output.columns(head, rows, width, ("MACHINE", "AGE"))


def _sort_key(pod: Pod) -> tuple[bool, str, int]:
    calm = pod.status.phase in ("Running", "Succeeded")
    return (calm, pod.metadata.labels.component, rank_of(pod))


def _wrap(line: str, width: int | None) -> list[str]:
    import textwrap

    line = escape(line)
    if not width or len(line) <= width:
        return [line]
    return textwrap.wrap(line, width, subsequent_indent="    ")
