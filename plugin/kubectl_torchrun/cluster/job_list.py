"""Jobs in a table."""

from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

from kubectl_torchrun import output
from kubectl_torchrun.cluster.client import Api
from kubectl_torchrun.cluster.kubectl import Target
from kubectl_torchrun.cluster.phases import NEW
from kubectl_torchrun.cluster.session import session
from kubectl_torchrun.cluster.slices import JOBS, JobSlice, ProgressSlice
from kubectl_torchrun.cluster.summary import node_count
from kubectl_torchrun.cluster.tables import (
    explain_all_namespaces,
    note_unreadable,
    show_live,
    v1_list,
)
from kubectl_torchrun.terminal import Display
from torchrun_api.json import JsonObject


class JobFilter(NamedTuple):
    """Which jobs are listed; empty means all."""

    everywhere: bool
    selector: str
    queue: str
    phases: frozenset[str]

    def takes(self, queue: str, phase: str) -> bool:
        """Whether jobs of this queue and phase are listed."""
        return self.queue in ("", queue) and (not self.phases or phase in self.phases)

    @property
    def query(self) -> dict[str, str]:
        """The selector for the API server."""
        return {"labelSelector": self.selector} if self.selector else {}


def print_jobs(
    target: Target,
    job_filter: JobFilter,
    form: str,
    terminal: Display,
    *,
    watch: bool = False,
) -> int:
    """Print the jobs, or follow them until Ctrl-C; the exit code, 0 also without jobs.

    Raises Problem.
    """
    with session(target) as cluster:
        if form not in ("", output.WIDE):
            output.write(cluster.run(lambda api: _list_objects(api, job_filter)), form)
            return 0
        wide = form == output.WIDE
        jobs = cluster.run(lambda api: _list_jobs(api, job_filter, terminal))
        if not jobs:
            jobs_of = f"jobs of queue {job_filter.queue}" if job_filter.queue else "jobs"
            where = "" if job_filter.everywhere else f" in namespace {cluster.namespace}"
            terminal.note(f"No {jobs_of} found{where}.")
        if watch:
            cluster.run(lambda api: _watch_jobs(api, job_filter, terminal, wide=wide))
        if not jobs:
            return 0
        width = None if wide else output.screen_width()
        output.print_lines(job_table(jobs, job_filter.everywhere, width, wide=wide))
    return 0


async def _list_jobs(api: Api, job_filter: JobFilter, terminal: Display) -> list[JobSlice]:
    request = api.list(JOBS, job_filter.query, everywhere=job_filter.everywhere)
    listed = await explain_all_namespaces(request, everywhere=job_filter.everywhere)
    note_unreadable(listed.unreadable, terminal)
    return [job for job in listed.items if job_filter.takes(job.spec.job_queue, job.status.phase)]


async def _watch_jobs(api: Api, job_filter: JobFilter, terminal: Display, *, wide: bool) -> None:
    shown: list[JobSlice] = []

    async def update() -> AsyncIterator[None]:
        async for jobs in api.watch(
            JOBS, job_filter.query, everywhere=job_filter.everywhere, skips_unreadable=True
        ):
            shown[:] = (
                job
                for job in jobs.values()
                if job_filter.takes(job.spec.job_queue, job.status.phase)
            )
            yield

    def frame(live: bool) -> list[str]:
        width = None if wide or not live else output.screen_width()
        lines = job_table(shown, job_filter.everywhere, width, wide=wide, ages=live)
        return lines if shown else []

    await show_live([update()], frame, terminal)


async def _list_objects(api: Api, job_filter: JobFilter) -> JsonObject:
    request = api.read(JOBS.path("" if job_filter.everywhere else api.namespace), job_filter.query)
    response = await explain_all_namespaces(request, everywhere=job_filter.everywhere)

    def takes(item: JsonObject) -> bool:
        spec, status = item.get("spec"), item.get("status")
        queue = str(spec.get("jobQueue", "")) if isinstance(spec, dict) else ""
        phase = str(status.get("phase", "")) if isinstance(status, dict) else ""
        return job_filter.takes(queue, phase)

    return v1_list(response, JOBS.kind, takes)


def job_table(
    jobs: Sequence[JobSlice],
    everywhere: bool,
    width: int | None,
    *,
    wide: bool = False,
    ages: bool = True,
) -> list[str]:
    """Lines; the newest job is last, next to the prompt. wide: with the columns GPUs to message."""
    head = ["NAMESPACE"] * everywhere + [
        *("NAME", "QUEUE", "NODES", "PHASE", "PROGRESS", *(["AGE"] * ages), "REASON"),
        *(("GPUS", "RESTARTS", "CHECKPOINT", "IMAGE", "MESSAGE") if wide else ()),
    ]
    rows = [
        [job.metadata.namespace] * everywhere
        + [
            job.metadata.name,
            job.spec.job_queue,
            node_count(job),
            job.status.phase or NEW,
            _step_text(job.status.progress),
            *([output.age(job.metadata.creation_timestamp)] * ages),
            job.status.reason,
            *(_wide_cells(job) if wide else ()),
        ]
        for job in sorted(jobs, key=_age_key)
    ]
    return output.columns(head, rows, width, ("QUEUE", "NODES", "PROGRESS"))


def _wide_cells(job: JobSlice) -> tuple[str, ...]:
    status = job.status
    gpus = status.gpus if status.gpus is not None else job.spec.num_gpus
    return (
        "-" if gpus is None else str(gpus),
        str(status.restarts),
        "-" if status.last_checkpoint is None else str(status.last_checkpoint.step),
        job.spec.image or "-",
        status.message,
    )


def _step_text(progress: ProgressSlice | None) -> str:
    """`1200/5000` or only the step; `-` without a report."""
    if progress is None or progress.step is None:
        return "-"
    return f"{progress.step}/{progress.total_steps}" if progress.total_steps else str(progress.step)


def _age_key(job: JobSlice) -> tuple[str, str, str]:
    created = job.metadata.creation_timestamp
    return (
        job.metadata.namespace,
        created.isoformat() if created else "",
        job.metadata.name,
    )
