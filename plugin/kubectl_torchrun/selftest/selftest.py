"""The self-test: its jobs one after the other, a line for each check, and the two files."""

import tempfile
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import msgspec

from kubectl_torchrun.cluster.client import Api, RequestError
from kubectl_torchrun.cluster.kubectl import Target
from kubectl_torchrun.cluster.session import Cluster, session
from kubectl_torchrun.doctor.controller import controller_version
from kubectl_torchrun.doctor.snapshot import CONTROLLER_QUERY, DEPLOYMENTS, items_at, text_at
from kubectl_torchrun.errors import DETACHED, RUN_FAILED, SUCCEEDED, UsageProblem, why
from kubectl_torchrun.selftest import checks, report
from kubectl_torchrun.selftest.checks import CheckResult
from kubectl_torchrun.selftest.facts import JobRecord, RankVersions
from kubectl_torchrun.selftest.job import JobSize, SelftestJob
from kubectl_torchrun.selftest.report import MARKS, Facts
from kubectl_torchrun.terminal import Display
from kubectl_torchrun.text import style
from kubectl_torchrun.upload.cache import UploadCache, Workspace
from kubectl_torchrun.upload.submission import select_queue
from kubectl_torchrun.upload.tree import File, Tree
from kubectl_torchrun.version import version

WORKSPACE = Path(__file__).parent / "workspace"
TOTAL_SECONDS = 1200.0
_COLOURS = {"passed": "green", "failed": "red", "skipped": "yellow"}
_WIDTH = max(len(check.title) for job in checks.JOBS.values() for check in job)


class SelftestOptions(NamedTuple):
    """Options of selftest. gpus: of each node; None: those of the queue."""

    queue: str
    nodes: int
    gpus: int | None
    output: Path


def selftest(target: Target, options: SelftestOptions, terminal: Display) -> int:
    """Run all checks, write the report; the exit code. Raises Problem."""
    _check_folder(options.output)
    began, now = time.monotonic(), datetime.now().astimezone()
    with session(target) as cluster:
        queue = cluster.run(lambda api: select_queue(api, options.queue))
        settings = JobSize(queue, options.nodes, options.gpus)
        facts = cluster.run(lambda api: _facts(api, now, options.nodes))
        results, runs, interrupted = _make_checks(cluster, settings, terminal, began)
    facts = _complete(facts, runs, time.monotonic() - began)
    body = report.as_json(facts, results)
    path = options.output / f"torchrun-selftest-{now:%Y%m%d-%H%M%S}.json"
    _write(path, msgspec.json.format(msgspec.json.encode(body), indent=2) + b"\n")
    _write(path.with_suffix(".html"), report.as_html(facts, results).encode())
    page = path.with_suffix(".html").name
    terminal.note(f"Wrote {path} and {page}, which have no names of the cluster.")
    if interrupted:
        return DETACHED
    terminal.note("Please send both in an issue, so that others know what works on such hardware.")
    return SUCCEEDED if report.has_passed(results) else RUN_FAILED


def _make_checks(
    cluster: Cluster, settings: JobSize, terminal: Display, began: float
) -> tuple[list[CheckResult], list[JobRecord], bool]:
    """The results, the jobs that ran, and whether Ctrl-C has ended them."""
    deadline = began + TOTAL_SECONDS
    workspace = _read_workspace(cluster)
    results: list[CheckResult] = []
    runs: list[JobRecord] = []
    interrupted, blocked = False, ""
    for name, job in checks.JOBS.items():
        since = time.monotonic()
        if blocked or since > deadline:
            found = checks.skip(job, blocked or "the time of the self-test is over")
        else:
            one = SelftestJob(cluster, name, settings, workspace, terminal, deadline)
            run = one.run()
            interrupted = one.interrupted
            found = checks.skip(job, run.why) if interrupted else checks.judge(job, run)
            runs.append(run)
            if interrupted:
                blocked = run.why
            elif not run.has_started:
                blocked = "no rank of an earlier check has started"
        for result in found:
            _print(result, terminal)
        results += found
    return results, runs, interrupted


def _read_workspace(cluster: Cluster) -> Workspace:
    """The script of the ranks. Nothing is scanned: a .gitignore may hide the plugin itself."""
    file = File("train.py", WORKSPACE / "train.py", (WORKSPACE / "train.py").stat().st_size, False)
    return UploadCache(cluster.where, WORKSPACE).digest(Tree(WORKSPACE, (file,), (), ()))


async def _facts(api: Api, now: datetime, nodes: int) -> Facts:
    """The versions of the cluster. The controller's is unknown to users who may not read it."""
    kubernetes = text_at(await api.read("/version"), "gitVersion")
    try:
        deployments = items_at(await api.read(DEPLOYMENTS, CONTROLLER_QUERY), "items")
    except RequestError:
        deployments = []
    controller = next((found for each in deployments if (found := controller_version(each))), "")
    return Facts(now.date().isoformat(), nodes, version(), controller, kubernetes)


def _complete(facts: Facts, runs: Sequence[JobRecord], seconds: float) -> Facts:
    """The facts with those that the ranks have told."""
    saved = [event.files for run in runs for event in run.of("saved")]
    return facts._replace(
        ranks=next((run.versions for run in runs if run.versions.world), RankVersions()),
        files=saved[0] if saved else None,
        seconds=seconds,
    )


def _print(result: CheckResult, terminal: Display) -> None:
    terminal.at_rest()
    mark = style(f"{MARKS[result.verdict]} ", fg=_COLOURS[result.verdict])
    seconds = "" if result.found.seconds is None else f"{result.found.seconds:.1f} s"
    terminal.note(mark + f"{result.check.title:<{_WIDTH}}  {seconds:>7}  {result.text}")


def _check_folder(folder: Path) -> None:
    """Raises UsageProblem if the report cannot be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageProblem(f"Cannot write to --output-dir {folder}: {why(error)}.") from None


def _write(path: Path, content: bytes) -> None:
    """Write a file. Raises UsageProblem."""
    try:
        path.write_bytes(content)
    except OSError as error:
        raise UsageProblem(f"Cannot write {path}: {why(error)}.") from None
