"""Why a job waits or died."""

from datetime import datetime

import click

from kubectl_torchrun.api import Api, ApiError
from kubectl_torchrun.kubectl import Target
from kubectl_torchrun.mirror import has_started
from kubectl_torchrun.session import session
from kubectl_torchrun.slices import JOBS, PODS, Job
from torchrun_api import names
from torchrun_api.core import Pod

TAIL = 20  # lines of the log of the rank that failed


def why(target: Target, name: str) -> int:
    """Print why a job waits or died, and the last lines of the rank that failed first."""
    with session(target) as cluster:
        job = cluster.run(lambda api: api.get(JOBS, name))
        for line in story(job):
            click.echo(line)
        cluster.run(lambda api: _tail(api, job))
    return 0


def story(job: Job) -> list[str]:
    """What the status says, a line each."""
    status = job.status
    lines = [f"{job.metadata.name}: {status.phase or 'new'}"]
    if status.reason:
        lines.append(f"  {status.reason}: {status.message}")
    lines += [
        f"  {condition.type} is {condition.status}: {condition.message}"
        for condition in status.conditions
        if condition.status != "True" and condition.message and condition.reason != status.reason
    ]
    if status.attempts:
        lines.append(f"  restarts: {status.restarts} counted, {status.disruptions} not counted")
    lines += [
        f"  attempt {attempt.number} ended {_clock(attempt.end_time)}: {attempt.message}"
        for attempt in status.attempts
    ]
    return lines


def _clock(time: datetime | None) -> str:
    return f"{time:%H:%M:%S} UTC" if time else "at an unknown time"


async def _tail(api: Api, job: Job) -> None:
    failure = job.status.last_failure
    if failure is None:
        return
    selector = f"{names.JOB_LABEL}={job.metadata.name},{names.COMPONENT_LABEL}={names.WORKER}"
    pods = (await api.list(PODS, {"labelSelector": selector})).items
    pod = next((pod for pod in pods if _is_of(pod, failure.message)), None)
    if pod is None:
        click.echo("  its pod is gone, and its log with it")
        return
    click.echo(f"last lines of pod {pod.metadata.name}:")
    try:
        query = {"tailLines": str(TAIL)}
        async with api.log(pod.metadata.name, names.TRAINER_CONTAINER, query) as lines:
            async for line in lines:
                click.echo(f"  {line.decode(errors='replace').rstrip()}")
    except ApiError as error:
        click.echo(f"  no log: {error}")


def _is_of(pod: Pod, message: str) -> bool:
    """Whether a failure's message speaks of this pod and there is a log to show."""
    named = f"{pod.metadata.name}:" in message or f"{pod.metadata.name} " in f"{message} "
    return named and has_started(pod, names.TRAINER_CONTAINER)
