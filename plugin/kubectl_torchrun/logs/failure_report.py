"""Why a job is waiting or failed: its status, and the last lines of the rank that failed first."""

import itertools
import re
import sys

from kubectl_torchrun.cluster.client import Api, ApiError
from kubectl_torchrun.cluster.kubectl import Target
from kubectl_torchrun.cluster.pods import has_started, is_training, list_workers
from kubectl_torchrun.cluster.repeated_failure import find_repeated_failure
from kubectl_torchrun.cluster.session import Cluster, session
from kubectl_torchrun.cluster.slices import JOBS, Job
from kubectl_torchrun.cluster.summary import status_lines
from kubectl_torchrun.errors import ClusterProblem
from kubectl_torchrun.logs import broken_edits
from kubectl_torchrun.logs.copies import STATE, Place
from kubectl_torchrun.logs.progress_line import progress_line
from kubectl_torchrun.logs.torchrun_report import RANK_MARK
from kubectl_torchrun.terminal import has_colour
from kubectl_torchrun.text import Styled, echo, log_text
from torchrun_api import names
from torchrun_api.core import Pod

TAIL = 20  # lines of the log of the rank that failed
# Lines to read: after a failure, torchrun writes up to 40 more, and the launcher 360 in an hour
# of waiting for an edit.
_READ = 400
_TORCHRUN = re.compile(rb"[EW]\d{4} .*torch/distributed/elastic/multiprocessing/")


def print_report(target: Target, name: str) -> int:
    """Print why a job is waiting or failed; the exit code. Raises Problem."""
    with session(target) as cluster:
        job = cluster.run(lambda api: api.get(JOBS, name))
        for line in status_lines(job):
            echo(line)
        repeated = find_repeated_failure(job)
        if repeated is not None:
            echo(f"  {repeated.describe()}".replace("\n", "\n  "))
        if job.status.progress is not None:
            running = job.status.phase == "Running"
            echo(f"  progress: {progress_line(job.status.progress, None, running=running)}")
        _print_last_lines(cluster, job)
        cluster.run(lambda api: _print_broken_edit(api, cluster, job))
    return 0


async def _print_broken_edit(api: Api, cluster: Cluster, job: Job) -> None:
    """Print the first node whose command failed after an edit, with its last lines."""
    if not job.spec.development:
        return
    pod = await broken_edits.find_broken(api, job, await list_workers(api, job))
    if pod is None:
        return
    echo(f"  {broken_edits.describe(cluster, job, pod)}")
    echo(f"Last lines of pod {pod.metadata.name}:")
    lines = await broken_edits.tail(api, pod, _READ)
    _print([line for line in lines if not broken_edits.is_waiting_line(line)][-TAIL:])


def _print_last_lines(cluster: Cluster, job: Job) -> None:
    """Print those of the rank that failed first: from its pod, else from the copy on the PVC."""
    failure = job.status.last_failure
    if failure is None:
        return
    pods = cluster.run(lambda api: list_workers(api, job))
    pod = next((pod for pod in pods if _is_failed_pod(pod, failure.message)), None)
    if pod is not None:
        cluster.run(lambda api: _print_tail(api, pod.metadata.name))
        return
    place_in_copies = attempt_and_node(job.metadata.name, failure.message)
    running = next((pod for pod in pods if is_training(pod)), None)
    if place_in_copies is None:  # the message has no name of a pod
        echo("  The pod was deleted, and its log with it.")
    elif running is None:
        hint = cluster.command(f"torchrun logs {job.metadata.name} --attempt {place_in_copies[0]}")
        echo(f"  The pod was deleted. The job's PVC may have a copy of its log: {hint}")
    else:
        place = Place(cluster, running.metadata.name, names.TRAINER_CONTAINER, STATE)
        _print_copy(place, *place_in_copies)


def _print_copy(place: Place, attempt: int, node: int) -> None:
    try:
        lines = [*place.lines(attempt, node, _READ)]
    except ClusterProblem as problem:
        echo(f"  The pod was deleted, and the copy of its log cannot be read: {problem}")
        return
    if not lines:
        echo("  The pod was deleted, and there is no copy of its log.")
        return
    echo(f"Last lines of node {node} in attempt {attempt}:")
    _print(of_ranks(lines))


def _print(lines: list[bytes]) -> None:
    """Print lines of a log."""
    colour = has_colour(sys.stdout)
    for line in lines:
        echo(Styled("  ") + log_text(line.rstrip(), colour=colour))


def of_ranks(lines: list[bytes]) -> list[bytes]:
    """The last lines of a node's ranks, without torchrun's report of the failure."""
    # A mark without text is the head of torchrun's report of the first failure.
    marks = ((line, RANK_MARK.match(line)) for line in lines)
    marked = [line for line, mark in marks if mark and line[mark.end() :].strip()]
    before = [*itertools.takewhile(lambda line: not _TORCHRUN.match(line), lines)]
    return (marked or before or lines)[-TAIL:]


def attempt_and_node(job: str, message: str) -> tuple[int, int] | None:
    """Attempt and node of the pod in the message of a failure; None without a pod."""
    child = rf"{re.escape(job)}(?:-r(?P<attempt>\d+))?-(?P<node>\d+)(?:-[a-z0-9]{{5}})?"
    match = re.search(rf"(?:^|\s){child}[:\s]", f"{message} ")
    return (int(match["attempt"] or 0), int(match["node"])) if match else None


async def _print_tail(api: Api, pod: str) -> None:
    echo(f"Last lines of pod {pod}:")
    try:
        query = {"tailLines": str(_READ)}
        async with api.log(pod, names.TRAINER_CONTAINER, query) as read:
            lines = [line async for line in read]
        _print(of_ranks(lines))
    except ApiError as error:
        echo(f"  Cannot read the log: {error}")


def _is_failed_pod(pod: Pod, message: str) -> bool:
    """Whether the message of a failure names this pod, and the pod has a log."""
    is_named = f"{pod.metadata.name}:" in message or f"{pod.metadata.name} " in f"{message} "
    return is_named and has_started(pod, names.TRAINER_CONTAINER)
