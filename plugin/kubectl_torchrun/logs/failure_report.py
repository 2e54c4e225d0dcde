"""Why a job waits or died: its status, and the last lines of the rank that failed first."""

import itertools
import re
import sys

from kubectl_torchrun.cluster.client import Api, ApiError
from kubectl_torchrun.cluster.kubectl import Target
from kubectl_torchrun.cluster.pods import has_started, is_training, list_workers
from kubectl_torchrun.cluster.session import Cluster, session
from kubectl_torchrun.cluster.slices import JOBS, Job
from kubectl_torchrun.cluster.summary import progress_line, status_lines
from kubectl_torchrun.errors import ClusterProblem
from kubectl_torchrun.logs import broken_edits
from kubectl_torchrun.logs.copies import STATE, Place
from kubectl_torchrun.logs.streams import RANK_MARK
from kubectl_torchrun.terminal import has_colour
from kubectl_torchrun.text import Styled, echo, log_text
from torchrun_api import names
from torchrun_api.core import Pod

TAIL = 20  # lines of the log of the rank that failed
# Lines that are read to find these: torchrun writes up to 40 after a failure, and the launcher 360
# in an hour of waiting for an edit.
_READ = 400
_TORCHRUN = re.compile(rb"[EW]\d{4} .*torch/distributed/elastic/multiprocessing/")


def print_report(target: Target, name: str) -> int:
    """Print why a job waits or died; the exit code. Raises Problem."""
    with session(target) as cluster:
        job = cluster.run(lambda api: api.get(JOBS, name))
        for line in status_lines(job):
            echo(line)
        if job.status.progress is not None:
            echo(f"  progress: {progress_line(job.status.progress, None)}")
        _last_lines(cluster, job)
        cluster.run(lambda api: _broken_edit(api, cluster, job))
    return 0


async def _broken_edit(api: Api, cluster: Cluster, job: Job) -> None:
    """The first node whose command failed after an edit, with what it wrote last."""
    if not job.spec.development:
        return
    pod = await broken_edits.find_broken(api, job, await list_workers(api, job))
    if pod is None:
        return
    echo(f"  {broken_edits.describe(cluster, job, pod)}")
    echo(f"last lines of pod {pod.metadata.name}:")
    lines = await broken_edits.tail(api, pod, _READ)
    _print([line for line in lines if not broken_edits.is_waiting_line(line)][-TAIL:])


def _last_lines(cluster: Cluster, job: Job) -> None:
    """Print those of the rank that failed first: from its pod, else from the copy on the claim."""
    failure = job.status.last_failure
    if failure is None:
        return
    pods = cluster.run(lambda api: list_workers(api, job))
    pod = next((pod for pod in pods if _is_of(pod, failure.message)), None)
    if pod is not None:
        cluster.run(lambda api: _tail(api, pod.metadata.name))
        return
    place_in_copies = attempt_and_node(job.metadata.name, failure.message)
    running = next((pod for pod in pods if is_training(pod)), None)
    if place_in_copies is None:
        echo("  its pod is gone, and its log with it")
    elif running is None:
        hint = cluster.command(f"torchrun logs {job.metadata.name} --attempt {place_in_copies[0]}")
        echo(f"  its pod is gone; a copy of its log may be on the job's claim: {hint}")
    else:
        place = Place(cluster, running.metadata.name, names.TRAINER_CONTAINER, STATE)
        _tail_of_copy(place, *place_in_copies)


def _tail_of_copy(place: Place, attempt: int, node: int) -> None:
    try:
        lines = [*place.lines(attempt, node, _READ)]
    except ClusterProblem as problem:
        echo(f"  its pod is gone, and the copy of its log cannot be read: {problem}")
        return
    if not lines:
        echo("  its pod is gone, and there is no copy of its log")
        return
    echo(f"last lines of node {node} in attempt {attempt}:")
    _print(of_ranks(lines))


def _print(lines: list[bytes]) -> None:
    """Lines of a log."""
    colour = has_colour(sys.stdout)
    for line in lines:
        echo(Styled("  ") + log_text(line.rstrip(), colour=colour))


def of_ranks(lines: list[bytes]) -> list[bytes]:
    """The last lines of a node's ranks, without what torchrun writes about their end."""
    # A mark without text is torchrun's own, above its report of the first failure.
    marks = ((line, RANK_MARK.match(line)) for line in lines)
    marked = [line for line, mark in marks if mark and line[mark.end() :].strip()]
    before = [*itertools.takewhile(lambda line: not _TORCHRUN.match(line), lines)]
    return (marked or before or lines)[-TAIL:]


def attempt_and_node(job: str, message: str) -> tuple[int, int] | None:
    """Attempt and node of the pod that a failure's message names; None where it names none."""
    child = rf"{re.escape(job)}(?:-r(?P<attempt>\d+))?-(?P<node>\d+)(?:-[a-z0-9]{{5}})?"
    match = re.search(rf"(?:^|\s){child}[:\s]", f"{message} ")
    return (int(match["attempt"] or 0), int(match["node"])) if match else None


async def _tail(api: Api, pod: str) -> None:
    echo(f"last lines of pod {pod}:")
    try:
        query = {"tailLines": str(_READ)}
        async with api.log(pod, names.TRAINER_CONTAINER, query) as read:
            lines = [line async for line in read]
        _print(of_ranks(lines))
    except ApiError as error:
        echo(f"  no log: {error}")


def _is_of(pod: Pod, message: str) -> bool:
    """Whether a failure's message names this pod and the pod has a log."""
    named = f"{pod.metadata.name}:" in message or f"{pod.metadata.name} " in f"{message} "
    return named and has_started(pod, names.TRAINER_CONTAINER)
