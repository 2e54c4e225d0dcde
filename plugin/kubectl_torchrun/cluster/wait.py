"""--wait: until a job is in a phase, a condition of it is true, or it is gone."""

from typing import NamedTuple

import anyio

from kubectl_torchrun.cluster.client import Api
from kubectl_torchrun.cluster.job_watch import JobWatch
from kubectl_torchrun.cluster.narrator import Narrator
from kubectl_torchrun.cluster.slices import JobSlice
from kubectl_torchrun.errors import RUN_FAILED, SUCCEEDED, TimeoutProblem, UsageProblem
from kubectl_torchrun.terminal import Display
from torchrun_api.kinds.status import PHASES

DELETED = "Deleted"
CONDITIONS = ("QueueReady", "WorkspaceReady", "Admitted", "Scheduled", "Complete")
_TICK_SECONDS = 1.0


class SpecChange(NamedTuple):
    """A change of the spec, before which no status counts.

    generation: of the job after the change. nodes: the size that it asks for.
    """

    generation: int = 0
    nodes: int | None = None

    def is_done(self, job: JobSlice) -> bool:
        """Whether the status shows it. The status of a job that has ended is final."""
        if job.has_ended:
            return True
        has_size = self.nodes is None or job.status.num_nodes == self.nodes
        return has_size and job.status.observed_generation >= self.generation


NO_CHANGE = SpecChange()


def check(condition: str) -> str:
    """The condition as it is spelled in a status. Raises UsageProblem if it is unknown."""
    names = {name.lower(): name for name in (*PHASES, *CONDITIONS, DELETED)}
    if condition.lower() not in names:
        raise UsageProblem(
            f"Unknown phase or condition in --wait={condition}."
            f" Valid values: {', '.join(names.values())}."
        )
    return names[condition.lower()]


def met(job: JobSlice | None, condition: str, change: SpecChange = NO_CHANGE) -> bool:
    """Whether the job meets the condition now. A job that has succeeded has been Running."""
    if job is None or condition == DELETED:
        return job is None and condition == DELETED
    phase = job.status.phase
    phases = (phase, "Running") if phase == "Succeeded" else (phase,)
    return change.is_done(job) and (
        condition in phases
        or any(c.type == condition and c.status == "True" for c in job.status.conditions)
    )


async def wait(
    api: Api,
    name: str,
    terminal: Display,
    condition: str,
    seconds: float | None,
    change: SpecChange = NO_CHANGE,
) -> int:
    """Wait, and print changes of the job meanwhile; the exit code.

    RUN_FAILED if the job ends or is deleted without meeting the condition. Raises TimeoutProblem.
    """
    job_watch = JobWatch(api, name)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(job_watch.run)
        code = await until(job_watch, terminal, condition, seconds, change)
        tasks.cancel_scope.cancel()
    return code


async def until(
    job_watch: JobWatch,
    terminal: Display,
    condition: str,
    seconds: float | None,
    change: SpecChange = NO_CHANGE,
) -> int:
    """Wait as `wait` does, with a JobWatch that another task runs."""
    narrator = Narrator(job_watch, terminal)
    with anyio.move_on_after(seconds):
        while True:
            narrator.catch_up()
            if job_watch.has_read:
                if met(job_watch.job, condition, change):
                    terminal.at_rest()
                    return SUCCEEDED
                if job_watch.job is None:
                    terminal.at_rest()
                    terminal.note(f"Job {job_watch.name} was deleted before it was {condition}.")
                    return RUN_FAILED
                if job_watch.job.has_ended and condition != DELETED:
                    terminal.at_rest()
                    terminal.note(
                        f"Job {job_watch.name} is {job_watch.job.status.phase}, not {condition}."
                    )
                    return RUN_FAILED
            await job_watch.next_change(_TICK_SECONDS)
    status = job_watch.job.status if job_watch.job else None
    now = f" It is {status.phase or 'new'} ({status.reason}: {status.message})." if status else ""
    if status and change.nodes is not None and status.num_nodes != change.nodes:
        condition += f" with {change.nodes} nodes"
        now += f" Its size is {status.num_nodes or 0}."
    raise TimeoutProblem(
        f"Job {job_watch.name} is not {condition} after {seconds:g} s.{now}\n"
        "The request stays in effect."
    )
