"""The logs of a job's nodes, from their pods or from the copies on its PVC."""

from collections.abc import Set
from contextlib import ExitStack
from typing import NamedTuple

import anyio

from kubectl_torchrun.cluster.client import Api
from kubectl_torchrun.cluster.job_watch import JobWatch
from kubectl_torchrun.cluster.kubectl import Target
from kubectl_torchrun.cluster.narrator import Narrator
from kubectl_torchrun.cluster.pods import attempt_of, has_started, list_workers, rank_of
from kubectl_torchrun.cluster.ranks import Ranks, ranks_of
from kubectl_torchrun.cluster.session import Cluster, session
from kubectl_torchrun.cluster.slices import JOBS, Job
from kubectl_torchrun.errors import DETACHED, Problem, UsageProblem
from kubectl_torchrun.logs import copies
from kubectl_torchrun.logs.follow import MOST_STREAMS, follow
from kubectl_torchrun.logs.streams import Cursor, LineFormat, Lines, View, merged
from kubectl_torchrun.terminal import Terminal
from torchrun_api import names
from torchrun_api.core import Pod


class LogChoice(NamedTuple):
    """Flags of `logs`. nodes, ranks: empty for all. attempt: None for the latest."""

    nodes: frozenset[int]
    ranks: frozenset[int]
    attempt: int | None
    previous: bool
    tail: int | None  # lines of each node
    since: float | None  # seconds
    line_format: LineFormat = LineFormat()
    raw: bool = False  # torchrun's reports of failed ranks in full


def follow_logs(target: Target, name: str, choice: LogChoice, terminal: Terminal) -> int:
    """Print existing and new lines until the run ends; its exit code. Raises Problem."""
    with session(target) as cluster:
        job = cluster.run(lambda api: api.get(JOBS, name))
        view = _build_view(cluster, job, choice)

        async def work(api: Api) -> int:
            cursors = await _print_backlog(api, job, view, terminal)
            job_watch = JobWatch(api, name, uid=job.metadata.uid)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(job_watch.run)
                narrator = Narrator(job_watch, terminal)
                tasks.start_soon(narrator.run)
                code = await follow(api, job_watch, terminal, narrator, view, cursors)
                tasks.cancel_scope.cancel()
            return code

        try:
            return cluster.run(work)
        except KeyboardInterrupt:
            terminal.interrupted()
            return DETACHED


def print_logs(target: Target, name: str, choice: LogChoice, terminal: Terminal) -> int:
    """Print existing lines; the exit code. Raises Problem."""
    with session(target) as cluster:
        job = cluster.run(lambda api: api.get(JOBS, name))
        _print_lines(cluster, job, choice, _build_view(cluster, job, choice), terminal)
    return 0


def _build_view(cluster: Cluster, job: Job, choice: LogChoice) -> View:
    ranks = cluster.run(lambda api: ranks_of(api, job)) if choice.ranks else Ranks()
    return View(
        choice.nodes,
        choice.ranks,
        ranks,
        choice.tail,
        choice.since,
        choice.line_format,
        choice.raw,
    )


def _print_lines(
    cluster: Cluster, job: Job, choice: LogChoice, view: View, terminal: Terminal
) -> int:
    pods = cluster.run(lambda api: list_workers(api, job))
    attempt = _select_attempt(job, pods, choice)
    started = {
        rank_of(pod): pod.metadata.name
        for pod in pods
        if attempt_of(pod) == attempt
        and view.takes(rank_of(pod))
        and has_started(pod, names.TRAINER_CONTAINER)
    }
    if len(started) > MOST_STREAMS:
        terminal.note(
            f"Printing the first {MOST_STREAMS} of {len(started)} nodes. Select others with --node."
        )
    selected = sorted(started.items())[:MOST_STREAMS]
    with ExitStack() as until:
        log_copies: list[tuple[int, copies.LogCopy]] = []
        if not (started and _is_complete(job, attempt, view, started.keys())):
            if not started and not (job.status.start_time or job.status.attempts):
                raise _no_logs(job, choice)
            try:
                log_copies = _download_copies(
                    cluster, job, pods, attempt, view, set(started), terminal, until
                )
            except Problem as problem:
                if not started:
                    raise
                terminal.note(f"Cannot read the logs of other nodes. {problem}")

        async def show(api: Api) -> None:
            cursors: list[tuple[int, Lines]] = [
                (node, Cursor(api, pod, view)) for node, pod in selected
            ]
            folded = [(node, view.fold(lines)) for node, lines in [*cursors, *log_copies]]
            async for node, line in merged(folded, view, terminal.note):
                terminal.log(node, line, prefix=view.line_format.prefix)

        cluster.run(show)
    return 0


def _is_complete(job: Job, attempt: int, view: View, started: Set[int]) -> bool:
    """Whether no other selected node can have a log."""
    if view.nodes and not view.ranks and view.nodes <= started:
        return True
    if attempt != job.status.attempt:
        return False
    # Pods of a job that has ended are removed: by the Job controller, or together with their nodes.
    nodes = range(job.status.num_nodes or 0)
    return not job.has_ended or all(node in started for node in nodes if view.takes(node))


def _no_logs(job: Job, choice: LogChoice) -> Problem:
    status = job.status
    scope = " of these nodes" if choice.nodes or choice.ranks else ""
    return UsageProblem(
        f"Job {job.metadata.name} has no logs{scope}."
        f" It is {status.phase or 'new'}. {status.reason}: {status.message}"
    )


def _download_copies(
    cluster: Cluster,
    job: Job,
    pods: list[Pod],
    attempt: int,
    view: View,
    known_nodes: set[int],
    terminal: Terminal,
    until: ExitStack,
) -> list[tuple[int, copies.LogCopy]]:
    """The copies of the nodes whose pods are deleted. Raises Problem if there are none."""
    with copies.place(cluster, job, pods, terminal) as place:
        attempts, nodes = place.listing(attempt)
        missing = [node for node in nodes if node not in known_nodes and view.takes(node)]
        if not missing and not known_nodes:
            existing = f"attempts {', '.join(map(str, attempts))}" if attempts else "no attempt"
            raise UsageProblem(
                f"The PVC of job {job.metadata.name} has no matching log of attempt {attempt}."
                f" It has logs of {existing}."
            )
        log_copies = [(node, place.download(attempt, node, view, until)) for node in missing]
    if not all(log_copy.timed for _, log_copy in log_copies):
        terminal.note(
            "Copies of an older launcher have no times, so they are printed first, node by node"
            + ("." if view.since is None else ", and --since does not apply to them.")
        )
    return log_copies


async def _print_backlog(api: Api, job: Job, view: View, terminal: Terminal) -> dict[str, Lines]:
    """Print existing lines, merged by time; the cursors to continue from, by UID of the pod."""
    pods = await list_workers(api, job)
    newest = max(map(attempt_of, pods), default=0)
    selected = [
        pod
        for pod in sorted(pods, key=rank_of)
        if attempt_of(pod) == newest
        and view.takes(rank_of(pod))
        and has_started(pod, names.TRAINER_CONTAINER)
    ]
    cursors = [
        (pod, view.fold(Cursor(api, pod.metadata.name, view))) for pod in selected[:MOST_STREAMS]
    ]
    backlogs = [(rank_of(pod), cursor) for pod, cursor in cursors]
    async for node, line in merged(backlogs, view, terminal.note):
        terminal.log(node, line, prefix=view.line_format.prefix)
    return {pod.metadata.uid: cursor for pod, cursor in cursors}


def _select_attempt(job: Job, pods: list[Pod], choice: LogChoice) -> int:
    newest = max([job.status.attempt, *map(attempt_of, pods)])
    if choice.previous:
        if newest == 0:
            raise UsageProblem(
                f"Job {job.metadata.name} is on its first attempt. There is no previous one."
            )
        older = [attempt.number for attempt in job.status.attempts if attempt.number < newest]
        return max(older, default=newest - 1)
    if choice.attempt is None:
        return max(map(attempt_of, pods), default=newest)
    if choice.attempt > newest:
        raise UsageProblem(
            f"Job {job.metadata.name} has no attempt {choice.attempt}. The latest is {newest}."
        )
    return choice.attempt
