"""Suspend, resume, scale and delete jobs. The controller does the rest."""

import sys
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from kubectl_torchrun import output
from kubectl_torchrun.cluster import wait
from kubectl_torchrun.cluster.client import Api, ApiError
from kubectl_torchrun.cluster.kubectl import Target
from kubectl_torchrun.cluster.session import Cluster, session
from kubectl_torchrun.cluster.slices import CLAIMS, JOBS, Job
from kubectl_torchrun.errors import DETACHED, RUN_FAILED, SUCCEEDED, UsageProblem
from kubectl_torchrun.terminal import Terminal, ask
from kubectl_torchrun.text import echo
from torchrun_api import names
from torchrun_api.json import JsonObject


class ChangeOptions(NamedTuple):
    """Options of the commands that change or delete jobs. timeout: seconds, None for no end."""

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
    terminal: Terminal,
) -> int:
    """Suspend, resume or scale a job by a patch of its spec; the exit code. Raises Problem."""
    condition = options.wait and wait.check(options.wait)
    with session(target) as cluster:
        job = cluster.run(lambda api: api.get(JOBS, name))
        if job.ended:
            raise UsageProblem(f"{name} is over ({job.status.phase}): there is nothing to {verb}.")
        spec = _spec(job, verb, nodes)
        if options.dry_run == "client":
            terminal.note(f"Would {verb} {name}: {msgspec.json.encode(spec).decode()}")
            return 0
        dry = options.dry_run == "server"
        patch = msgspec.json.encode({"spec": spec})
        changed = cluster.run(lambda api: api.merge(JOBS, name, patch, dry_run=dry))
        if options.form:
            output.write(output.without_noise(changed), options.form)
        if dry:
            terminal.note(f"The API server would take it: {verb} {name}")
            return 0
        terminal.note(_notice(cluster, job, verb, nodes))
        if not condition:
            return 0
        return cluster.run(lambda api: wait.wait(api, name, terminal, condition, options.timeout))


def _spec(job: Job, verb: str, nodes: int | None) -> JsonObject:
    if verb != "scale":
        return {"suspend": verb == "suspend"}
    name, elastic = job.metadata.name, job.spec.elastic
    assert nodes is not None
    if job.spec.num_gpus:
        raise UsageProblem(
            f"{name} asks for {job.spec.num_gpus} GPUs, not for nodes (spec.numGPUs), and keeps"
            " its size: submit a new job with --nodes to scale it."
        )
    if elastic and not elastic.min_nodes <= nodes <= elastic.max_nodes:
        raise UsageProblem(
            f"{name} takes {elastic.min_nodes} to {elastic.max_nodes} nodes (spec.elastic),"
            f" not {nodes}."
        )
    if not elastic and job.status.phase not in ("", "Pending"):
        raise UsageProblem(
            f"{name} is {job.status.phase} and has a fixed size: only a job with spec.elastic"
            " takes another one while it runs. Submit a new job."
        )
    return {"numNodes": nodes}


def _notice(cluster: Cluster, job: Job, verb: str, nodes: int | None) -> str:
    name = job.metadata.name
    if verb == "suspend":
        go_on = cluster.command(f"torchrun resume {name}")
        return (
            f"{name} pauses: its ranks get SIGTERM and their grace period, claims are kept.\n"
            f"Go on: {go_on}"
        )
    watch = cluster.command(f"torchrun logs {name} -f")
    if verb == "resume":
        return f"{name} goes on. Watch: {watch}"
    many = f"{nodes} node{'s' * (nodes != 1)}"
    return f"{name} gets {many} (it had {job.spec.num_nodes}). Watch: {watch}"


def cancel(
    target: Target, jobs: Sequence[str], options: ChangeOptions, terminal: Terminal, *, sure: bool
) -> int:
    """Delete jobs, after a question where a terminal can be asked; the exit code.

    As kubectl does: a name without a job costs the others nothing. Raises Problem.
    """
    with session(target) as cluster:
        existing = cluster.run(lambda api: _existing(api, jobs))
        missing = [name for name in jobs if name not in existing]
        unknown = f"no job {', '.join(missing)} in the namespace {cluster.namespace}"
        if not existing:
            see = cluster.command("torchrun list")
            raise UsageProblem(f"There is {unknown}: nothing was deleted. See: {see}")
        if missing:
            terminal.note(f"There is {unknown}.")
        stays = cluster.run(lambda api: _retained(api, existing))
        if options.dry_run == "client":
            terminal.note(f"Would delete {', '.join(existing)}{stays}")
        elif sure or options.dry_run == "server" or _confirmed(existing, stays):
            _delete(cluster, existing, stays, options, terminal)
        else:
            terminal.note("Nothing was deleted.")
            return DETACHED
    return RUN_FAILED if missing else SUCCEEDED


def _delete(
    cluster: Cluster, jobs: Sequence[str], stays: str, options: ChangeOptions, terminal: Terminal
) -> None:
    dry = options.dry_run == "server"
    for name in jobs:
        cluster.run(lambda api, name=name: api.delete(JOBS, name, dry_run=dry))  # type: ignore[misc]
        if options.form:
            echo(f"torchrunjob.torchrun.ai/{name}")
        word = "Would delete" if dry else "Deleted"
        terminal.note(f"{word} torchrunjob.torchrun.ai/{name}")
    if dry:
        return
    whose = "Its" if len(jobs) == 1 else "Their"
    terminal.note(f"{whose} pods get their grace period; {whose.lower()} claims go{stays}.")
    for name in jobs if options.wait else ():
        cluster.run(
            lambda api, name=name: wait.wait(  # type: ignore[misc]
                api, name, terminal, wait.DELETED, options.timeout
            )
        )


async def _existing(api: Api, jobs: Sequence[str]) -> list[str]:
    """The names that belong to a job, each once."""
    existing = []
    for name in dict.fromkeys(jobs):
        try:
            await api.get(JOBS, name)
        except ApiError as error:
            if error.status != 404 or not error.details.name:
                raise
        else:
            existing.append(name)
    return existing


def _confirmed(jobs: Sequence[str], stays: str) -> bool:
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return True
    question = f"Delete {', '.join(jobs)} with pods and claims{stays}? [y/N]:"
    try:
        return ask(question).lower() in ("y", "yes")
    except KeyboardInterrupt:
        echo(file=sys.stderr)
        return False


async def _retained(api: Api, jobs: Sequence[str]) -> str:
    """`, but NAMES stay`: the claims that no job owns; empty where they may not be listed."""
    query = {"labelSelector": f"{names.RETAINED_LABEL} in ({','.join(jobs)})"}
    try:
        claims = [claim.metadata.name for claim in (await api.list(CLAIMS, query)).items]
    except ApiError:
        return ""
    return f", but {', '.join(sorted(claims))} stay{'s' * (len(claims) == 1)}" if claims else ""
