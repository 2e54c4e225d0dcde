"""`status`: one job's whole story on a screen, live on a terminal."""

import shutil
import sys
from collections.abc import Sequence
from datetime import UTC, datetime

import anyio

from kubectl_torchrun import output
from kubectl_torchrun.cluster.client import Api
from kubectl_torchrun.cluster.kubectl import Target
from kubectl_torchrun.cluster.mirror import Mirror, attempt_of, rank_of
from kubectl_torchrun.cluster.session import Cluster, session
from kubectl_torchrun.cluster.slices import JOBS, PODS, Job, ProgressSlice
from kubectl_torchrun.cluster.story import story
from kubectl_torchrun.commands.queue_tables import nodes
from kubectl_torchrun.errors import DETACHED, RUN_FAILED, SUCCEEDED
from kubectl_torchrun.logs import broken_edits
from kubectl_torchrun.logs.follow import Narrator
from kubectl_torchrun.terminal import Terminal, phase_style
from kubectl_torchrun.text import escape, join, style
from torchrun_api import names
from torchrun_api.core import Pod

_TICK_SECONDS = 1.0
_EDIT_SECONDS = 3.0
_BAR = 24


def show(target: Target, name: str, terminal: Terminal, *, watch: bool | None, form: str) -> int:
    """Print or keep drawing the view; the exit code, the run's where it was watched to its end."""
    with session(target) as cluster:
        if form:
            path = JOBS.path(cluster.namespace, name)
            output.write(output.without_noise(cluster.run(lambda api: api.read(path))), form)
            return 0
        job = cluster.run(lambda api: api.get(JOBS, name))
        live = sys.stdout.isatty() and terminal.live
        if not (live if watch is None else watch):
            pods = cluster.run(lambda api: _pods(api, name))
            failed = cluster.run(lambda api: broken_edits.broken(api, job, pods))
            said = broken_edits.told(cluster, job, failed) if failed else ""
            output.say(view(job, pods, output.screen_width(), None, said))
            return 0
        work = _redraw if live else _tell
        try:
            return cluster.run(lambda api: work(api, cluster, name, terminal))
        except KeyboardInterrupt:
            terminal.interrupted()
            terminal.note(f"The job goes on. {cluster.command(f'torchrun status {name}')}")
            return DETACHED


async def _pods(api: Api, name: str) -> list[Pod]:
    return list((await api.list(PODS, {"labelSelector": f"{names.JOB_LABEL}={name}"})).items)


class _Edits:
    """Whether an edit has broken a run, looked at now and then; `said` is what to tell of it."""

    def __init__(self, api: Api, cluster: Cluster, mirror: Mirror) -> None:
        self.said = ""
        self._api = api
        self._cluster = cluster
        self._mirror = mirror

    async def look(self) -> None:
        """Until cancelled."""
        while True:
            job = self._mirror.job
            if job is not None:
                pods = list(self._mirror.pods.values())
                failed = await broken_edits.broken(self._api, job, pods)
                self.said = broken_edits.told(self._cluster, job, failed) if failed else ""
            await anyio.sleep(_EDIT_SECONDS)


async def _tell(api: Api, cluster: Cluster, name: str, terminal: Terminal) -> int:
    mirror = Mirror(api, name)
    narrator = Narrator(mirror, terminal)
    edited, told = _Edits(api, cluster, mirror), ""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(mirror.keep)
        tasks.start_soon(edited.look)
        while not _over(mirror):
            narrator.catch_up()
            if edited.said not in ("", told):
                terminal.note(edited.said)
            told = edited.said
            await mirror.changed(_TICK_SECONDS)
        narrator.catch_up()
        tasks.cancel_scope.cancel()
    return _code(mirror, terminal)


async def _redraw(api: Api, cluster: Cluster, name: str, terminal: Terminal) -> int:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    mirror = Mirror(api, name)
    edited = _Edits(api, cluster, mirror)
    console = Console(highlight=False, markup=False)

    def picture() -> Text:
        if mirror.job is None:
            return Text(f"{name} ...")
        size = shutil.get_terminal_size()
        pods = list(mirror.pods.values())
        lines = view(mirror.job, pods, size.columns, size.lines - 1, edited.said)
        return Text.from_ansi(join(lines), no_wrap=True, overflow="ellipsis")

    with Live(picture(), console=console, auto_refresh=False) as drawing:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(mirror.keep)
            tasks.start_soon(edited.look)
            while not _over(mirror):
                drawing.update(picture(), refresh=True)
                await mirror.changed(_TICK_SECONDS)
            if mirror.job is not None:
                await mirror.refresh_pods()
                drawing.update(picture(), refresh=True)
            tasks.cancel_scope.cancel()
    return _code(mirror, terminal)


def _over(mirror: Mirror) -> bool:
    return mirror.seen and (mirror.job is None or mirror.job.ended)


def _code(mirror: Mirror, terminal: Terminal) -> int:
    terminal.at_rest()
    if mirror.job is None:
        terminal.note(f"The job {mirror.name} was deleted.")
        return RUN_FAILED
    return SUCCEEDED if mirror.job.status.phase == "Succeeded" else RUN_FAILED


def view(
    job: Job, pods: Sequence[Pod], width: int | None, height: int | None, edit: str = ""
) -> list[str]:
    """The lines of one view, at most `height`; styled, which `echo` undoes off terminals.

    edit: what is to be told of a broken one.
    """
    status, now = job.status, datetime.now(UTC)
    head = (
        f"{job.metadata.name}   queue {job.spec.job_queue}   nodes {nodes(job)}"
        + (f" ({status.gpus} GPUs)" if status.gpus else "")
        + f"   age {output.age(job.metadata.creation_timestamp, now)}"
    )
    _, *said = story(job)
    said += [f"  {edit}"] if edit else []
    phase = status.phase or "New"
    told = output.cut(escape(f"{phase}   {status.workers_status}".rstrip()), width)
    shown = told[: len(escape(phase))]
    lines: list[str] = [
        output.cut(escape(head), width),
        style(shown, **phase_style(phase)) + told[len(shown) :],
    ]
    if status.progress is not None:
        lines.append(output.cut(progress_line(status.progress, width), width))
    for line in said:
        lines += _wrapped(line, width)
    table = pod_table(pods, width)
    if table:
        lines.append("")
        room = max(height - len(lines) - 1, 2) if height else len(table)
        lines += table[:room]
        if len(table) > room:
            lines.append(f"... and {len(table) - room} more pods")
    return lines[:height] if height else lines


def pod_table(pods: Sequence[Pod], width: int | None) -> list[str]:
    """The newest gang and what prepares it; those that need a look come first."""
    newest = max(map(attempt_of, pods), default=0)
    shown = [
        pod
        for pod in pods
        if pod.metadata.labels.component != names.WORKER or attempt_of(pod) == newest
    ]
    if not shown:
        return []
    rows = [
        [
            pod.metadata.name,
            pod.spec.node_name or "-",
            "Terminating" if pod.metadata.deletion_timestamp else pod.status.phase or "-",
            output.age(pod.metadata.creation_timestamp),
            trouble(pod),
        ]
        for pod in sorted(shown, key=_urgency)
    ]
    return output.columns(("POD", "NODE", "PHASE", "AGE", "WHY"), rows, width, ("NODE", "AGE"))


def _urgency(pod: Pod) -> tuple[bool, str, int]:
    calm = pod.status.phase in ("Running", "Succeeded")
    return (calm, pod.metadata.labels.component, rank_of(pod))


def trouble(pod: Pod) -> str:
    """Why a pod is not simply running: the scheduler's, the kubelet's or the container's words."""
    for status in (*pod.status.init_container_statuses, *pod.status.container_statuses):
        waiting, ended = status.state.waiting, status.state.terminated
        if waiting is not None and waiting.reason not in ("", "PodInitializing"):
            return f"{waiting.reason} {waiting.message}".strip()
        if ended is not None and ended.exit_code:
            return f"{ended.reason or 'Error'} (exit code {ended.exit_code})"
    for condition in pod.status.conditions:
        if condition.type == "PodScheduled" and condition.status == "False":
            return f"{condition.reason}: {condition.message}"
    return " ".join(part for part in (pod.status.reason, pod.status.message) if part)


def progress_line(said: ProgressSlice, width: int | None) -> str:
    """`step 1200 of 5000 [#####-----] 24 %   loss 2.31   8400 samples/s   3s ago`."""
    parts = []
    if said.step is not None and said.total_steps:
        share = min(said.step / said.total_steps, 1.0)
        full = round(share * _BAR)
        bar = "" if width and width < 72 else f"[{'#' * full}{'-' * (_BAR - full)}] "
        parts.append(f"step {said.step} of {said.total_steps} {bar}{share:.0%}")
    elif said.step is not None:
        parts.append(f"step {said.step}")
    if said.loss is not None:
        parts.append(f"loss {said.loss:.4g}")
    if said.samples_per_second is not None:
        parts.append(f"{said.samples_per_second:,.0f} samples/s")
    if said.time is not None:
        parts.append(f"{output.age(said.time)} ago")
    return output.GAP.join(parts)


def _wrapped(line: str, width: int | None) -> list[str]:
    import textwrap

    line = escape(line)
    if not width or len(line) <= width:
        return [line]
    return textwrap.wrap(line, width, subsequent_indent="    ")
