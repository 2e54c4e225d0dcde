"""Many jobs or queues in a table."""

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, TypeVar

from kubectl_torchrun import output
from kubectl_torchrun.cluster.client import Api, ApiError
from kubectl_torchrun.cluster.kubectl import Target
from kubectl_torchrun.cluster.session import session
from kubectl_torchrun.cluster.slices import JOBS, QUEUES, Job, ProgressSlice, Queue
from kubectl_torchrun.commands.queue_tables import nodes, queue_table, waiting_table
from kubectl_torchrun.errors import ClusterProblem
from kubectl_torchrun.terminal import Terminal
from torchrun_api.json import JsonObject

R = TypeVar("R")


class Choice(NamedTuple):
    """Which objects are listed; empty means all."""

    everywhere: bool = False
    selector: str = ""
    queue: str = ""
    phases: frozenset[str] = frozenset()


def jobs(target: Target, choice: Choice, form: str, terminal: Terminal) -> int:
    """Print the jobs; exit code 0 also where there are none."""
    with session(target) as cluster:
        if form:
            listed = cluster.run(lambda api: _raw(api, choice))
            output.write(listed, form)
            return 0
        found = cluster.run(lambda api: _jobs(api, choice, terminal))
        if not found:
            where = "" if choice.everywhere else f" in the namespace {cluster.namespace}"
            terminal.note(f"No jobs{where}.")
            return 0
        output.say(job_table(found, choice.everywhere, output.screen_width()))
    return 0


def queues(target: Target, choice: Choice, form: str, terminal: Terminal) -> int:
    """Print the queues with what is used of them, and the jobs that wait to be admitted."""
    with session(target) as cluster:
        if form:
            path = QUEUES.path("" if choice.everywhere else cluster.namespace)
            listed = cluster.run(lambda api: _allowed(api.read(path), choice))
            output.write(_list(listed, QUEUES.kind, lambda _: True), form)
            return 0

        async def ask(api: Api) -> tuple[Sequence[Queue], Sequence[Job]]:
            found = await _allowed(api.list(QUEUES, everywhere=choice.everywhere), choice)
            tell_unreadable(found.unreadable, terminal)
            try:
                listed = await api.list(JOBS, everywhere=choice.everywhere)
                tell_unreadable(listed.unreadable, terminal)
                jobs = listed.items
            except ApiError as error:
                if error.status != 403:
                    raise
                terminal.note(f"Jobs are not counted: {error.message}")
                jobs = ()
            return found.items, jobs

        found, running = cluster.run(ask)
        if not found:
            where = "" if choice.everywhere else f" in the namespace {cluster.namespace}"
            terminal.note(f"No TorchrunQueues{where}; an administrator makes them.")
            return 0
        width = output.screen_width()
        output.say(queue_table(found, running, choice.everywhere, width))
        waiting = waiting_table(running, choice.everywhere, width)
        if waiting:
            output.say(["", *waiting])
    return 0


def job_table(jobs: Sequence[Job], everywhere: bool, width: int | None) -> list[str]:
    """Lines; the newest job comes last, next to the prompt."""
    head = ["NAMESPACE"] * everywhere + [
        *("NAME", "QUEUE", "NODES", "PHASE", "PROGRESS", "AGE", "REASON"),
    ]
    rows = [
        [job.metadata.namespace] * everywhere
        + [
            job.metadata.name,
            job.spec.job_queue,
            nodes(job),
            job.status.phase or "New",
            progress(job.status.progress),
            output.age(job.metadata.creation_timestamp),
            job.status.reason,
        ]
        for job in sorted(jobs, key=_by_age)
    ]
    return output.columns(head, rows, width, ("QUEUE", "NODES", "PROGRESS"))


def progress(said: ProgressSlice | None) -> str:
    """`1200/5000` or the step alone; `-` where nothing is reported."""
    if said is None or said.step is None:
        return "-"
    return f"{said.step}/{said.total_steps}" if said.total_steps else str(said.step)


def _by_age(job: Job) -> tuple[str, str, str]:
    created = job.metadata.creation_timestamp
    return (
        job.metadata.namespace,
        created.isoformat() if created else "",
        job.metadata.name,
    )


def _chosen(choice: Choice, queue: str, phase: str) -> bool:
    return choice.queue in ("", queue) and (not choice.phases or phase in choice.phases)


def _query(choice: Choice) -> dict[str, str]:
    return {"labelSelector": choice.selector} if choice.selector else {}


async def _allowed(asked: Awaitable[R], choice: Choice) -> R:
    """Who may not look into all namespaces is told which flag asks for that."""
    try:
        return await asked
    except ApiError as error:
        if error.status == 403 and choice.everywhere:
            raise ClusterProblem(
                f"{error.message}\nLeave out --all-namespaces to see one namespace."
            ) from error
        raise


def tell_unreadable(lines: Sequence[str], terminal: Terminal) -> None:
    """Say which objects are missing from what is shown."""
    for line in lines:
        terminal.note(f"Left out: {line}")


async def _jobs(api: Api, choice: Choice, terminal: Terminal) -> list[Job]:
    listed = await _allowed(api.list(JOBS, _query(choice), everywhere=choice.everywhere), choice)
    tell_unreadable(listed.unreadable, terminal)
    return [job for job in listed.items if _chosen(choice, job.spec.job_queue, job.status.phase)]


async def _raw(api: Api, choice: Choice) -> JsonObject:
    path = JOBS.path("" if choice.everywhere else api.namespace)
    listed = await _allowed(api.read(path, _query(choice)), choice)

    def wanted(item: JsonObject) -> bool:
        spec, status = item.get("spec"), item.get("status")
        queue = str(spec.get("jobQueue", "")) if isinstance(spec, dict) else ""
        phase = str(status.get("phase", "")) if isinstance(status, dict) else ""
        return _chosen(choice, queue, phase)

    return _list(listed, JOBS.kind, wanted)


def _list(listed: JsonObject, kind: str, wanted: Callable[[JsonObject], bool]) -> JsonObject:
    """A v1 List, as kubectl prints it: each item says what it is."""
    items = listed.get("items")
    if not isinstance(items, list):
        raise ClusterProblem("The API server's answer is no list.")
    whole = ({"apiVersion": JOBS.api_version, "kind": kind, **item} for item in items
             if isinstance(item, dict) and wanted(item))  # fmt: skip
    return {
        "apiVersion": "v1",
        "kind": "List",
        "items": [output.without_noise(item) for item in whole],
    }
