"""Queues and the jobs that wait in them, in tables."""

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from fractions import Fraction
from typing import TypeVar

from kubectl_torchrun import output
from kubectl_torchrun.cluster.client import Api, RequestError
from kubectl_torchrun.cluster.kubectl import Target
from kubectl_torchrun.cluster.session import session
from kubectl_torchrun.cluster.slices import JOBS, QUEUES, JobSlice, QueueSlice
from kubectl_torchrun.cluster.summary import node_count
from kubectl_torchrun.cluster.tables import (
    explain_all_namespaces,
    note_unreadable,
    show_live,
    v1_list,
)
from kubectl_torchrun.terminal import Display
from torchrun_api.kinds import quantity
from torchrun_api.kinds.kind import Kind
from torchrun_api.kinds.status import WAITING

T = TypeVar("T", JobSlice, QueueSlice)

_WAITING = frozenset({"", *WAITING})  # "": no controller has processed the job yet
_BAR = 10  # characters


def print_queues(
    target: Target, everywhere: bool, form: str, terminal: Display, *, watch: bool = False
) -> int:
    """Print the queues, and the jobs that wait for admission, or follow them until Ctrl-C.

    Returns the exit code. Raises Problem.
    """
    with session(target) as cluster:
        if form not in ("", output.WIDE):
            path = QUEUES.path("" if everywhere else cluster.namespace)
            response = cluster.run(
                lambda api: explain_all_namespaces(api.read(path), everywhere=everywhere)
            )
            output.write(v1_list(response, QUEUES.kind), form)
            return 0
        queues, jobs = cluster.run(lambda api: _list_queues_and_jobs(api, everywhere, terminal))
        if not queues:
            where = "" if everywhere else f" in namespace {cluster.namespace}"
            terminal.note(f"No TorchrunQueues found{where}. Ask an administrator to create one.")
            return 0
        wide = form == output.WIDE
        if watch:
            cluster.run(lambda api: _watch_queues(api, everywhere, terminal, wide=wide))
        output.print_lines(_tables(queues, jobs, everywhere, wide=wide))
    return 0


def _tables(
    queues: Sequence[QueueSlice],
    jobs: Sequence[JobSlice],
    everywhere: bool,
    *,
    wide: bool,
    ages: bool = True,
) -> list[str]:
    """The lines of both tables."""
    width = None if wide else output.screen_width()
    waiting = waiting_table(jobs, everywhere, width, ages=ages)
    lines = queue_table(queues, jobs, everywhere, width, wide=wide, ages=ages)
    return [*lines, "", *waiting] if waiting else lines


async def _watch_queues(api: Api, everywhere: bool, terminal: Display, *, wide: bool) -> None:
    shown_queues: list[QueueSlice] = []
    shown_jobs: list[JobSlice] = []

    async def update(kind: Kind[T], shown: list[T]) -> AsyncIterator[None]:
        async for objects in api.watch(kind, {}, everywhere=everywhere, skips_unreadable=True):
            shown[:] = objects.values()
            yield

    def frame(live: bool) -> list[str]:
        lines = _tables(shown_queues, shown_jobs, everywhere, wide=wide, ages=live)
        return lines if shown_queues else []

    await show_live([update(QUEUES, shown_queues), update(JOBS, shown_jobs)], frame, terminal)


async def _list_queues_and_jobs(
    api: Api, everywhere: bool, terminal: Display
) -> tuple[Sequence[QueueSlice], Sequence[JobSlice]]:
    request = api.list(QUEUES, everywhere=everywhere)
    queues = await explain_all_namespaces(request, everywhere=everywhere)
    note_unreadable(queues.unreadable, terminal)
    try:
        jobs = await api.list(JOBS, everywhere=everywhere)
    except RequestError as error:
        if error.status != 403:
            raise
        terminal.note(f"Cannot count jobs: {error.message}")
        return queues.items, ()
    note_unreadable(jobs.unreadable, terminal)
    return queues.items, jobs.items


def queue_table(
    queues: Sequence[QueueSlice],
    jobs: Sequence[JobSlice],
    everywhere: bool,
    width: int | None,
    *,
    wide: bool = False,
    ages: bool = True,
) -> list[str]:
    """Lines, by name: a bar for the used quota, and the number of running and waiting jobs.

    wide: with scheduler and storage class of the workspace.
    """
    running, waiting = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for job in jobs:
        key = (job.metadata.namespace, job.spec.job_queue)
        running[key] += job.status.phase == "Running"
        waiting[key] += job.status.phase in _WAITING
    head = ["NAMESPACE"] * everywhere + [
        *("NAME", "USED", "WEIGHT", "QUOTA", "RUNNING", "WAITING", "GPUS/NODE"),
        *(["AGE"] * ages),
        "IMAGE",
        *(("SCHEDULER", "STORAGECLASS") if wide else ()),
    ]
    rows = []
    for queue in sorted(queues, key=_queue_key):
        meta, spec = queue.metadata, queue.spec
        rows.append(
            [meta.namespace] * everywhere
            + [
                meta.name,
                used(queue),
                "-" if spec.weight is None else f"{spec.weight:g}",
                ",".join(f"{name}={value}" for name, value in spec.quota.items()) or "-",
                str(running[_queue_key(queue)]),
                str(waiting[_queue_key(queue)]),
                str(spec.node_resources.gpus),
                *([output.age(meta.creation_timestamp)] * ages),
                spec.image or "-",
                *(_wide_cells(queue) if wide else ()),
            ]
        )
    return output.columns(head, rows, width, ("GPUS/NODE", "AGE", "WEIGHT", "IMAGE", "QUOTA"))


def _wide_cells(queue: QueueSlice) -> tuple[str, str]:
    spec = queue.spec
    workspace = spec.storage.workspace
    return (
        spec.scheduling.scheduler or "-",
        (workspace.storage_class_name if workspace else None) or "-",
    )


def waiting_table(
    jobs: Sequence[JobSlice], everywhere: bool, width: int | None, *, ages: bool = True
) -> list[str]:
    """Lines for the jobs that wait for admission, by queue and position; empty without any."""
    waiting = [job for job in jobs if job.status.phase in _WAITING and _admission_message(job)]
    if not waiting:
        return []
    head = ["NAMESPACE"] * everywhere + [
        *("QUEUE", "POSITION", "JOB", "NODES", *(["AGE"] * ages), "REASON")
    ]
    rows = [
        [job.metadata.namespace] * everywhere
        + [
            job.spec.job_queue,
            str(job.status.queue_position or "-"),
            job.metadata.name,
            node_count(job),
            *([output.age(job.metadata.creation_timestamp)] * ages),
            _admission_message(job),
        ]
        for job in sorted(waiting, key=_position_key)
    ]
    return output.columns(head, rows, width, ("AGE", "NODES"))


def used(queue: QueueSlice) -> str:
    """`[########--] 16/20 GPUs`: the bar shows the scarcest resource."""
    admission = queue.status.admission
    if admission is None:
        return "-"
    shares = [
        used_amount / (used_amount + free_amount)
        for kind, amount in admission.free.items()
        if (used_amount := _parse_amount(admission.used.get(kind, 0)))
        + (free_amount := _parse_amount(amount))
        > 0
    ]
    if not shares:
        return admission.summary or "-"
    filled = int(max(shares) * _BAR)  # full only if nothing is free
    return f"[{'#' * filled}{'-' * (_BAR - filled)}] {admission.summary}".rstrip()


def _admission_message(job: JobSlice) -> str:
    """Why the job is not admitted; empty if it is, or has no such condition yet."""
    for condition in job.status.conditions:
        if condition.type == "Admitted" and condition.status != "True":
            return condition.message or condition.reason
    return ""


def _parse_amount(value: object) -> Fraction:
    try:
        return quantity.parse(value if isinstance(value, int) else str(value))
    except ValueError:
        return Fraction(0)


def _queue_key(queue: QueueSlice) -> tuple[str, str]:
    return (queue.metadata.namespace, queue.metadata.name)


def _position_key(job: JobSlice) -> tuple[str, str, float, str]:
    position = job.status.queue_position
    key = float("inf") if position is None else position
    return (job.metadata.namespace, job.spec.job_queue, key, job.metadata.name)
