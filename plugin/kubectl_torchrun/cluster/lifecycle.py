"""Suspend, resume, scale and delete jobs."""

import sys
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from kubectl_torchrun import output
from kubectl_torchrun.cluster import wait
from kubectl_torchrun.cluster.client import Api, RequestError
from kubectl_torchrun.cluster.kubectl import Target
from kubectl_torchrun.cluster.session import Cluster, session
from kubectl_torchrun.cluster.slices import CLAIMS, JOBS, JobSlice
from kubectl_torchrun.errors import DETACHED, RUN_FAILED, SUCCEEDED, UsageProblem
from kubectl_torchrun.terminal import Display, ask
from kubectl_torchrun.text import echo
from torchrun_api import names
from torchrun_api.json import JsonObject
from torchrun_api.kinds.meta import ObjectMeta


class ChangeOptions(NamedTuple):
    """Options of the commands that change or delete jobs. timeout: seconds; None: none."""

    wait: str
    timeout: float | None
    dry_run: str  # none, client or server
    form: str


def change(
    target: Target,
    verb: str,
    name: str,
    nodes: int | None,
    options: ChangeOptions,
    terminal: Display,
) -> int:
    """Suspend, resume or scale a job by a patch of its spec; the exit code. Raises Problem."""
    condition = options.wait and wait.check(options.wait)
    with session(target) as cluster:
        job = cluster.run(lambda api: api.get(JOBS, name))
        if job.has_ended:
            raise UsageProblem(f"Cannot {verb} job {name}: it is already {job.status.phase}.")
        spec = _spec_patch(job, verb, nodes)
        if options.dry_run == "client":
            terminal.note(f"Would {verb} job {name}: {msgspec.json.encode(spec).decode()}")
            return 0
        dry = options.dry_run == "server"
        patch = msgspec.json.encode({"spec": spec})
        changed = cluster.run(lambda api: api.merge(JOBS, name, patch, dry_run=dry))
        if options.form:
            output.write(output.without_noise(changed), options.form)
        if dry:
            terminal.note(f"The API server accepts the request to {verb} job {name} (dry run).")
            return 0
        terminal.note(_success_message(cluster, job, verb, nodes))
        if not condition:
            return 0
        generation = msgspec.convert(changed["metadata"], ObjectMeta).generation
        awaited = wait.SpecChange(generation, nodes)
        return cluster.run(
            lambda api: wait.wait(api, name, terminal, condition, options.timeout, awaited)
        )


def _spec_patch(job: JobSlice, verb: str, nodes: int | None) -> JsonObject:
    if verb != "scale":
        return {"suspend": verb == "suspend"}
    name, elastic = job.metadata.name, job.spec.elastic
    assert nodes is not None
    if job.spec.num_gpus:
        raise UsageProblem(
            f"Job {name} requests {job.spec.num_gpus} GPUs (spec.numGPUs) and has a fixed size."
            " Submit a new job with --nodes."
        )
    if elastic and not elastic.min_nodes <= nodes <= elastic.max_nodes:
        raise UsageProblem(
            f"Job {name} cannot have {nodes} nodes. spec.elastic allows {elastic.min_nodes} to"
            f" {elastic.max_nodes}."
        )
    if not elastic and job.has_started:
        raise UsageProblem(
            f"Job {name} ({job.status.phase}) has started and is not elastic (spec.elastic), so"
            " its size is fixed. Submit a new job."
        )
    return {"numNodes": nodes}


def _success_message(cluster: Cluster, job: JobSlice, verb: str, nodes: int | None) -> str:
    name = job.metadata.name
    if verb == "suspend":
        resume = cluster.command(f"torchrun resume {name}")
        return (
            f"Suspending job {name}: its pods get SIGTERM and a grace period, its PVCs are kept.\n"
            f"Resume it: {resume}"
        )
    follow = cluster.command(f"torchrun logs {name} -f")
    if verb == "resume":
        return f"Resuming job {name}. Follow it: {follow}"
    size = f"{nodes} node{'s' * (nodes != 1)}"
    return f"Scaling job {name} from {job.spec.num_nodes} to {size}. Follow it: {follow}"


def cancel(
    target: Target,
    jobs: Sequence[str],
    options: ChangeOptions,
    terminal: Display,
    *,
    sure: bool,
) -> int:
    """Delete jobs, after a confirmation if a terminal is attached; the exit code.

    As with kubectl, a missing job does not prevent the deletion of the others. Raises Problem.
    """
    with session(target) as cluster:
        existing = cluster.run(lambda api: _find_jobs(api, jobs))
        missing = [name for name in jobs if name not in existing]
        if not existing:
            see = cluster.command("torchrun list")
            raise UsageProblem(f"{_not_found(cluster, missing)} Nothing was deleted. See: {see}")
        if missing:
            terminal.note(_not_found(cluster, missing))
        exception = cluster.run(lambda api: _retained_pvcs(api, existing))
        if options.dry_run == "client":
            terminal.note(f"Would delete {', '.join(existing)} with pods and PVCs{exception}")
        elif sure or options.dry_run == "server" or _confirm(existing, exception):
            missing += _delete(cluster, existing, exception, options, terminal)
        else:
            terminal.note("Nothing was deleted.")
            return DETACHED
    return RUN_FAILED if missing else SUCCEEDED


def _delete(
    cluster: Cluster,
    jobs: Sequence[str],
    exception: str,
    options: ChangeOptions,
    terminal: Display,
) -> list[str]:
    """Delete the jobs. Returns those that are gone, for example since the confirmation."""
    dry = options.dry_run == "server"
    deleted: list[str] = []
    for name in jobs:
        if not cluster.run(lambda api, name=name: delete_job(api, name, dry_run=dry)):  # type: ignore[misc]
            terminal.note(_not_found(cluster, [name]))
            continue
        deleted.append(name)
        if options.form:
            echo(f"torchrunjob.torchrun.ai/{name}")
        word = "Would delete" if dry else "Deleted"
        terminal.note(f"{word} torchrunjob.torchrun.ai/{name}")
    if deleted and not dry:
        whose = "Its" if len(deleted) == 1 else "Their"
        terminal.note(f"{whose} pods get a grace period. {whose} PVCs are deleted{exception}.")
    for name in deleted if options.wait and not dry else ():
        cluster.run(
            lambda api, name=name: wait.wait(  # type: ignore[misc]
                api, name, terminal, wait.DELETED, options.timeout
            )
        )
    return [name for name in jobs if name not in deleted]


async def delete_job(api: Api, name: str, *, dry_run: bool = False) -> bool:
    """Delete a job; whether it existed."""
    try:
        await api.delete(JOBS, name, dry_run=dry_run)
    except RequestError as error:
        if not _is_missing(error):
            raise
        return False
    return True


def _is_missing(error: RequestError) -> bool:
    """Whether the job does not exist, and not its kind."""
    return error.status == 404 and bool(error.details.name)


def _not_found(cluster: Cluster, jobs: Sequence[str]) -> str:
    return f"Job {', '.join(jobs)} not found in namespace {cluster.namespace}."


async def _find_jobs(api: Api, jobs: Sequence[str]) -> list[str]:
    """The names of existing jobs, each once."""
    existing = []
    for name in dict.fromkeys(jobs):
        try:
            await api.get(JOBS, name)
        except RequestError as error:
            if not _is_missing(error):
                raise
        else:
            existing.append(name)
    return existing


def _confirm(jobs: Sequence[str], exception: str) -> bool:
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return True
    question = f"Delete {', '.join(jobs)} with pods and PVCs{exception}? [y/N]:"
    try:
        return ask(question).lower() in ("y", "yes")
    except KeyboardInterrupt:
        echo(file=sys.stderr)
        return False


async def _retained_pvcs(api: Api, jobs: Sequence[str]) -> str:
    """`, except NAMES`: the PVCs that no job owns; empty if the user cannot list PVCs."""
    query = {"labelSelector": f"{names.RETAINED_LABEL} in ({','.join(jobs)})"}
    try:
        claims = [claim.metadata.name for claim in (await api.list(CLAIMS, query)).items]
    except RequestError:
        return ""
    return f", except {', '.join(sorted(claims))}" if claims else ""
