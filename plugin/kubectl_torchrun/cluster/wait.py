"""--wait: until a job is in a phase, a condition of it is true, or it is gone."""

import anyio

from kubectl_torchrun.cluster.client import Api
from kubectl_torchrun.cluster.job_watch import JobWatch
from kubectl_torchrun.cluster.narrator import Narrator
from kubectl_torchrun.cluster.slices import Job
from kubectl_torchrun.errors import RUN_FAILED, SUCCEEDED, TimeoutProblem, UsageProblem
from kubectl_torchrun.terminal import Terminal

DELETED = "Deleted"
PHASES = (
    *("Pending", "Syncing", "Queued", "Running", "Succeeded"),
    *("Failed", "Suspended", "TimedOut", "Preempted"),
)
CONDITIONS = ("QueueReady", "WorkspaceReady", "Admitted", "Scheduled", "Complete")
_TICK_SECONDS = 1.0


def check(condition: str) -> str:
    """The condition as it is written in a status. Raises UsageProblem for a word that is none."""
    known = {word.lower(): word for word in (*PHASES, *CONDITIONS, DELETED)}
    if condition.lower() not in known:
        raise UsageProblem(
            f"--wait={condition}: no such phase or condition."
            f" There are: {', '.join(known.values())}."
        )
    return known[condition.lower()]


def met(job: Job | None, condition: str) -> bool:
    """Whether it is so now."""
    if job is None or condition == DELETED:
        return job is None and condition == DELETED
    return job.status.phase == condition or any(
        c.type == condition and c.status == "True" for c in job.status.conditions
    )


async def wait(
    api: Api, name: str, terminal: Terminal, condition: str, seconds: float | None
) -> int:
    """Wait, saying what the job does meanwhile; the exit code.

    Raises TimeoutProblem. A job that ends or goes without ever meeting the condition is
    RUN_FAILED.
    """
    job_watch = JobWatch(api, name)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(job_watch.run)
        code = await until(job_watch, terminal, condition, seconds)
        tasks.cancel_scope.cancel()
    return code


async def until(
    job_watch: JobWatch, terminal: Terminal, condition: str, seconds: float | None
) -> int:
    """The same with a JobWatch that another task runs."""
    narrator = Narrator(job_watch, terminal)
    with anyio.move_on_after(seconds):
        while True:
            narrator.catch_up()
            if job_watch.seen:
                if met(job_watch.job, condition):
                    terminal.at_rest()
                    return SUCCEEDED
                if job_watch.job is None:
                    terminal.at_rest()
                    terminal.note(f"{job_watch.name} was deleted before it was {condition}.")
                    return RUN_FAILED
                if job_watch.job.ended and condition != DELETED:
                    terminal.at_rest()
                    terminal.note(
                        f"{job_watch.name} is {job_watch.job.status.phase}, not {condition}."
                    )
                    return RUN_FAILED
            await job_watch.next_change(_TICK_SECONDS)
    status = job_watch.job.status if job_watch.job else None
    now = f"it is {status.phase or 'new'} ({status.reason}: {status.message})" if status else ""
    raise TimeoutProblem(
        f"{job_watch.name} is not {condition} after {seconds:g} s{'; ' + now if now else ''}.\n"
        "The job is left as it is. --timeout says how long to wait."
    )
