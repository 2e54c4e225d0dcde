"""Why a job is waiting or failed: its status, and the last lines of the rank that failed first."""

import itertools
import re
import sys
from typing import NamedTuple

from kubectl_torchrun import output
from kubectl_torchrun.cluster.client import Api, RequestError
from kubectl_torchrun.cluster.kubectl import Target
from kubectl_torchrun.cluster.phases import NEW
from kubectl_torchrun.cluster.pods import has_started, is_training, list_workers
from kubectl_torchrun.cluster.repeated_failure import find_repeated_failure
from kubectl_torchrun.cluster.session import Cluster, session
from kubectl_torchrun.cluster.slices import JOBS, FailureSlice, JobSlice
from kubectl_torchrun.cluster.summary import status_lines
from kubectl_torchrun.errors import ClusterProblem
from kubectl_torchrun.logs import broken_edits, hung_stacks
from kubectl_torchrun.logs.copies import STATE, Place
from kubectl_torchrun.logs.progress_line import progress_line
from kubectl_torchrun.logs.torchrun_report import RANK_MARK
from kubectl_torchrun.terminal import has_colour
from kubectl_torchrun.text import Styled, echo, log_text
from torchrun_api import names
from torchrun_api.json import JsonObject
from torchrun_api.kinds.core import Pod

TAIL = 20  # lines of the log of the rank that failed
# Lines to read: after a failure, torchrun writes up to 40 more, and the launcher 360 in an hour
# of waiting for an edit.
_READ = 400
_TORCHRUN = re.compile(rb"[EW]\d{4} .*torch/distributed/elastic/multiprocessing/")


class Evidence(NamedTuple):
    """Lines of a log, below a title; or a note why there are none. Both are empty without any."""

    title: str = ""
    lines: tuple[bytes, ...] = ()
    note: str = ""


def print_report(target: Target, name: str, form: str = "") -> int:
    """Print why a job is waiting or failed; the exit code. Raises Problem.

    form: json or yaml for programs, else text.
    """
    with session(target) as cluster:
        job = cluster.run(lambda api: api.get(JOBS, name))
        evidence = _last_lines(cluster, job)
        edit = cluster.run(lambda api: _broken_edit(api, cluster, job))
        if form:
            output.write(_body(cluster, job, evidence, edit), form)
            return 0
        for line in status_lines(job):
            echo(line)
        repeated = find_repeated_failure(job)
        if repeated is not None:
            echo(f"  {repeated.describe()}".replace("\n", "\n  "))
        if job.status.progress is not None:
            echo(f"  progress: {progress_line(job.status)}")
        for each in (evidence, _hung_stacks(cluster, job), edit):
            _print(each)
    return 0


def _body(cluster: Cluster, job: JobSlice, evidence: Evidence, edit: Evidence) -> JsonObject:
    """The report for programs. Its fields stay; there may be more in a later version."""
    status = job.status
    failure = status.last_failure or FailureSlice()
    place = attempt_and_node(job.metadata.name, failure.message)
    lines = edit.lines or evidence.lines
    return {
        "job": job.metadata.name,
        "namespace": cluster.namespace,
        "phase": status.phase or NEW,
        "reason": status.reason,
        "message": status.message,
        "failure": f"{failure.reason}: {failure.message}" if status.last_failure else None,
        "attempt": place[0] if place else None,
        "node": place[1] if place else None,
        "rank": failure.rank,
        "machine": failure.node or None,
        "exitCode": failure.exit_code,
        "evidence": [str(log_text(line, colour=False)) for line in lines],
        "nextCommand": cluster.command(_next_words(job, place, is_broken=bool(edit.title))),
    }


def _next_words(job: JobSlice, place: tuple[int, int] | None, *, is_broken: bool) -> str:
    """The command that shows more, or makes the job go on."""
    name, status = job.metadata.name, job.status
    if is_broken or status.reason == "WaitingForUpload":
        return f"torchrun sync {name}"
    if status.phase in ("Running", "Succeeded"):
        return f"torchrun logs {name}{' --follow' * (status.phase == 'Running')}"
    if status.phase == "Suspended":
        return f"torchrun resume {name}"
    if status.phase == "Syncing":
        return f"torchrun logs {name} --container sync"
    if status.last_failure is not None and job.has_ended:
        where = f" --attempt {place[0]} --node {place[1]}" if place else ""
        return f"torchrun logs {name}{where}"
    if status.queue_position is not None:
        return "torchrun queues"
    return "torchrun doctor"


async def _broken_edit(api: Api, cluster: Cluster, job: JobSlice) -> Evidence:
    """The first node whose command failed after an edit, with its last lines."""
    if not job.spec.development:
        return Evidence()
    pod = await broken_edits.find_broken(api, job, await list_workers(api, job))
    if pod is None:
        return Evidence()
    lines = await broken_edits.tail(api, pod, _READ)
    output_lines = [line for line in lines if not broken_edits.is_waiting_line(line)][-TAIL:]
    note = f"  {broken_edits.describe(cluster, job, pod)}"
    return Evidence(f"Last lines of pod {pod.metadata.name}:", tuple(output_lines), note)


def _hung_stacks(cluster: Cluster, job: JobSlice) -> Evidence:
    """What the ranks did when they hung, if that was the last failure."""
    failure = job.status.last_failure
    if failure is None or failure.reason != "Hung":
        return Evidence()
    place = attempt_and_node(job.metadata.name, failure.message)
    attempt = place[0] if place else job.status.attempt or 0

    async def read(api: Api) -> list[bytes]:
        return await hung_stacks.read(api, await list_workers(api, job), attempt)

    lines = cluster.run(read)
    if lines:
        return Evidence("Stacks of the ranks when they hung, the odd one first:", tuple(lines))
    words = f"torchrun logs {job.metadata.name} --attempt {attempt}"
    return Evidence(note=f"  The log of each node may have the stacks: {cluster.command(words)}")


def _last_lines(cluster: Cluster, job: JobSlice) -> Evidence:
    """Those of the rank that failed first: from its pod, else from the copy on the PVC."""
    failure = job.status.last_failure
    if failure is None:
        return Evidence()
    pods = cluster.run(lambda api: list_workers(api, job))
    pod = next((pod for pod in pods if _is_failed_pod(pod, failure.message)), None)
    if pod is not None:
        return cluster.run(lambda api: _tail(api, pod.metadata.name))
    place_in_copies = attempt_and_node(job.metadata.name, failure.message)
    running = next((pod for pod in pods if is_training(pod)), None)
    if place_in_copies is None:  # the message has no name of a pod
        return Evidence(note="  The pod was deleted, and its log with it.")
    if running is None:
        hint = cluster.command(f"torchrun logs {job.metadata.name} --attempt {place_in_copies[0]}")
        note = f"  The pod was deleted. The job's PVC may have a copy of its log: {hint}"
        return Evidence(note=note)
    place = Place(cluster, running.metadata.name, names.TRAINER_CONTAINER, STATE)
    return _of_copy(place, *place_in_copies)


def _of_copy(place: Place, attempt: int, node: int) -> Evidence:
    try:
        lines = [*place.lines(attempt, node, _READ)]
    except ClusterProblem as problem:
        text = f"  The pod was deleted, and the copy of its log cannot be read: {problem}"
        return Evidence(note=text)
    if not lines:
        return Evidence(note="  The pod was deleted, and there is no copy of its log.")
    title = f"Last lines of node {node} in attempt {attempt}:"
    return Evidence(title, tuple(of_ranks(lines)))


def _print(evidence: Evidence) -> None:
    """Print the note, the title and the lines, if they are not empty."""
    for text in filter(None, (evidence.note, evidence.title)):
        echo(text)
    colour = has_colour(sys.stdout)
    for line in evidence.lines:
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


async def _tail(api: Api, pod: str) -> Evidence:
    title = f"Last lines of pod {pod}:"
    try:
        query = {"tailLines": str(_READ)}
        async with api.log(pod, names.TRAINER_CONTAINER, query) as read:
            lines = [line async for line in read]
    except RequestError as error:
        return Evidence(note=f"{title}\n  Cannot read the log: {error.message}")
    return Evidence(title, tuple(of_ranks(lines)))


def _is_failed_pod(pod: Pod, message: str) -> bool:
    """Whether the message of a failure names this pod, and the pod has a log."""
    is_named = f"{pod.metadata.name}:" in message or f"{pod.metadata.name} " in f"{message} "
    return is_named and has_started(pod, names.TRAINER_CONTAINER)
