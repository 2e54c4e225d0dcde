"""The logs of a job's nodes, from their pods or from the copies on its PVC."""

from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import ExitStack
from typing import NamedTuple

import anyio

from kubectl_torchrun.cluster.client import Api
from kubectl_torchrun.cluster.job_watch import JobWatch
from kubectl_torchrun.cluster.kubectl import Target
from kubectl_torchrun.cluster.narrator import Narrator
from kubectl_torchrun.cluster.pods import (
    Ranks,
    attempt_of,
    has_started,
    list_workers,
    rank_of,
    ranks_of,
)
from kubectl_torchrun.cluster.session import Cluster, session
from kubectl_torchrun.cluster.slices import JOBS, JobSlice
from kubectl_torchrun.errors import DETACHED, Problem, UsageProblem
from kubectl_torchrun.logs import copies
from kubectl_torchrun.logs.follow import MOST_STREAMS, follow
from kubectl_torchrun.logs.rotated import JoinedLog, LateStart, find_late
from kubectl_torchrun.logs.streams import Cursor, LineFormat, NodeLines, View, merged
from kubectl_torchrun.terminal import Display
from torchrun_api import names
from torchrun_api.kinds.core import Pod


class _NoCopies(UsageProblem):
    """The PVC has no copy of these nodes and this attempt."""


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


def follow_logs(target: Target, name: str, choice: LogChoice, terminal: Display) -> int:
    """Print existing and new lines until the run ends; its exit code. Raises Problem."""
    with session(target) as cluster:
        job = cluster.run(lambda api: api.get(JOBS, name))
        view = _build_view(cluster, job, choice)

        pods = cluster.run(lambda api: list_workers(api, job))
        selected = _select_pods(pods, max(map(attempt_of, pods), default=0), view)

        async def work(api: Api) -> int:
            cursors = _cursors(api, selected, late, log_copies, view, terminal)
            await _print_merged(cursors, view, terminal)
            by_uid = {
                pod.metadata.uid: lines for pod, (_, lines) in zip(selected, cursors, strict=True)
            }
            job_watch = JobWatch(api, name, uid=job.metadata.uid)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(job_watch.run)
                narrator = Narrator(job_watch, terminal)
                tasks.start_soon(narrator.run)
                code = await follow(api, job_watch, terminal, narrator, view, by_uid)
                tasks.cancel_scope.cancel()
            return code

        try:
            with ExitStack() as until:
                late = cluster.run(lambda api: find_late(api, selected, view))
                log_copies = _copies_of_late(
                    cluster, job, pods, selected, late, view, terminal, until
                )
                return cluster.run(work)
        except KeyboardInterrupt:
            terminal.interrupted()
            return DETACHED


def print_logs(target: Target, name: str, choice: LogChoice, terminal: Display) -> int:
    """Print existing lines; the exit code. Raises Problem."""
    with session(target) as cluster:
        job = cluster.run(lambda api: api.get(JOBS, name))
        _print_lines(cluster, job, choice, _build_view(cluster, job, choice), terminal)
    return 0


def _build_view(cluster: Cluster, job: JobSlice, choice: LogChoice) -> View:
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
    cluster: Cluster, job: JobSlice, choice: LogChoice, view: View, terminal: Display
) -> int:
    pods = cluster.run(lambda api: list_workers(api, job))
    attempt = _select_attempt(job, pods, choice)
    all_started = _select_pods(pods, attempt, view, most=None)
    started = {rank_of(pod) for pod in all_started}
    if len(started) > MOST_STREAMS:
        terminal.note(
            f"Printing the first {MOST_STREAMS} of {len(started)} nodes. Select others with --node."
        )
    selected = all_started[:MOST_STREAMS]
    late = cluster.run(lambda api: find_late(api, selected, view))
    with ExitStack() as until:
        log_copies: dict[int, copies.LogCopy] = {}
        if late or not (started and _is_complete(job, attempt, view, started)):
            if not started and not (job.status.start_time or job.status.attempts):
                raise _no_logs(job, choice)
            known = started - set(late)
            try:
                log_copies = _download_copies(
                    cluster,
                    job,
                    pods,
                    attempt,
                    view,
                    lambda node: node not in known and view.takes(node),
                    terminal,
                    until,
                )
            except Problem as problem:
                if not started:
                    raise
                is_missing = known == started or _is_cut(late)
                if is_missing and not isinstance(problem, _NoCopies):
                    terminal.note(f"Cannot read the copies of the logs. {problem}")

        async def show(api: Api) -> None:
            cursors = _cursors(api, selected, late, log_copies, view, terminal)
            others = [
                (node, view.fold(copy)) for node, copy in log_copies.items() if node not in started
            ]
            await _print_merged([*cursors, *others], view, terminal)

        cluster.run(show)
    return 0


def _select_pods(
    pods: Sequence[Pod], attempt: int, view: View, most: int | None = MOST_STREAMS
) -> list[Pod]:
    """The pods of the attempt that the view shows and that have a log, by node; at most `most`."""
    return [
        pod
        for pod in sorted(pods, key=rank_of)
        if attempt_of(pod) == attempt
        and view.takes(rank_of(pod))
        and has_started(pod, names.TRAINER_CONTAINER)
    ][:most]


def _copies_of_late(
    cluster: Cluster,
    job: JobSlice,
    pods: list[Pod],
    selected: Sequence[Pod],
    late: Mapping[int, LateStart],
    view: View,
    terminal: Display,
    until: ExitStack,
) -> dict[int, copies.LogCopy]:
    """The copies of logs that begin late; none if they cannot be read."""
    if not late:
        return {}
    attempt = attempt_of(selected[0])
    try:
        return _download_copies(
            cluster, job, pods, attempt, view, late.__contains__, terminal, until
        )
    except Problem as problem:
        if _is_cut(late):
            terminal.note(f"Cannot read the copies of the logs. {problem}")
        return {}


def _is_cut(late: Mapping[int, LateStart]) -> bool:
    """Whether one of these logs has lost lines, and was not just quiet at first."""
    return any(start.note(node) for node, start in late.items())


def _cursors(
    api: Api,
    pods: Sequence[Pod],
    late: Mapping[int, LateStart],
    log_copies: Mapping[int, copies.LogCopy],
    view: View,
    terminal: Display,
) -> list[tuple[int, NodeLines]]:
    """The logs of these pods, each after the part of its copy that the kubelet has removed."""
    cursors: list[tuple[int, NodeLines]] = []
    for pod in pods:
        node = rank_of(pod)
        lines: NodeLines = Cursor(api, pod.metadata.name, view)
        if node in late and node in log_copies:
            lines = JoinedLog(log_copies[node], late[node], lines, view.lines_to_read)
        elif node in late and (note := late[node].note(node)):
            terminal.note(note)
        cursors.append((node, view.fold(lines)))
    return cursors


async def _print_merged(
    cursors: Sequence[tuple[int, NodeLines]], view: View, terminal: Display
) -> None:
    async for node, line in merged(cursors, view, terminal.note):
        terminal.log(node, line, prefix=view.line_format.prefix)


def _is_complete(job: JobSlice, attempt: int, view: View, started: Set[int]) -> bool:
    """Whether no other selected node can have a log."""
    if view.nodes and not view.ranks and view.nodes <= started:
        return True
    if attempt != job.status.attempt:
        return False
    # Pods of a job that has ended are removed: by the Job controller, or together with their nodes.
    nodes = range(job.status.num_nodes or 0)
    return not job.has_ended or all(node in started for node in nodes if view.takes(node))


def _no_logs(job: JobSlice, choice: LogChoice) -> Problem:
    status = job.status
    scope = " of these nodes" if choice.nodes or choice.ranks else ""
    return UsageProblem(
        f"Job {job.metadata.name} has no logs{scope}."
        f" It is {status.phase or 'new'}. {status.reason}: {status.message}"
    )


def _download_copies(
    cluster: Cluster,
    job: JobSlice,
    pods: list[Pod],
    attempt: int,
    view: View,
    is_wanted: Callable[[int], bool],
    terminal: Display,
    until: ExitStack,
) -> dict[int, copies.LogCopy]:
    """The copies of these nodes. Raises Problem if there are none."""
    with copies.place(cluster, job, pods, terminal) as place:
        attempts, nodes = place.listing(attempt)
        wanted = [node for node in nodes if is_wanted(node)]
        if not wanted:
            existing = f"attempts {', '.join(map(str, attempts))}" if attempts else "no attempt"
            raise _NoCopies(
                f"The PVC of job {job.metadata.name} has no matching log of attempt {attempt}."
                f" It has logs of {existing}."
            )
        log_copies = {node: place.download(attempt, node, view, until) for node in wanted}
    if not all(log_copy.timed for log_copy in log_copies.values()):
        terminal.note(
            "Copies of an older launcher have no times, so they are printed first, node by node"
            + ("." if view.since is None else ", and --since does not apply to them.")
        )
    return log_copies


def _select_attempt(job: JobSlice, pods: list[Pod], choice: LogChoice) -> int:
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
