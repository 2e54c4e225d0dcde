"""spec.dependsOn: what must have become of other jobs before the first gang of this one.

Once a gang was made nothing of this matters any more: a job that runs needs no parent.
"""

from collections.abc import Mapping

from msgspec import Struct

from torchrun_api.admission import Dependency
from torchrun_api.job import TorchrunJob
from torchrun_controller.reconcile.attempts import gang
from torchrun_controller.reconcile.observed import Observed
from torchrun_controller.reconcile.phases import TERMINAL, Finding
from torchrun_controller.reconcile.workers import Why

CONDITION = "DependenciesMet"


class Hold(Struct, frozen=True):
    """Why the job may not start: for now, or (DEPENDENCY_FAILED) for ever."""

    finding: Finding
    why: Why


def hold(observed: Observed) -> Hold | None:
    """What keeps the job back; None where nothing does, or a gang was made already."""
    job, parents = observed.job, observed.parents
    if not job.spec.depends_on or gang.has_been(observed):
        return None
    cycle = _cycle(job, parents)
    if cycle:
        message = (
            f"spec.dependsOn: a cycle, {' -> '.join(cycle)}: none of these jobs can ever start;"
            " remove one of the dependencies"
        )
        return Hold(Finding.SPEC_INVALID, Why("InvalidSpec", message))
    if _were_met(observed):
        return None
    failed = [_failure(d, parents[d.name]) for d in job.spec.depends_on if d.name in parents]
    lost = next((message for message in failed if message), "")
    if lost:
        return Hold(Finding.DEPENDENCY_FAILED, Why("DependencyFailed", lost))
    waits = [w for w in (_wait(d, parents.get(d.name)) for d in job.spec.depends_on) if w]
    if not waits:
        return None
    missing = [d.name for d in job.spec.depends_on if d.name not in parents]
    reason = "DependencyNotFound" if missing else "WaitingForDependencies"
    return Hold(Finding.DEPENDENCY_WAITING, Why(reason, "waits for " + "; ".join(waits)))


def why_met(observed: Observed) -> Why | None:
    """That nothing is waited for; None for a job that depends on none."""
    if not observed.job.spec.depends_on:
        return None
    return Why("DependenciesMet", "every job of spec.dependsOn has come so far")


def _were_met(observed: Observed) -> bool:
    """Whether this spec was found met before: a parent that has gone since, by its TTL, did run."""
    status = observed.job.status
    return status.observed_generation == observed.job.metadata.generation and any(
        c.type == CONDITION and c.status == "True" for c in status.conditions
    )


def _wait(dependency: Dependency, parent: TorchrunJob | None) -> str:
    """What the parent has still to do, in words; nothing where it is done."""
    if parent is None:
        return f"{dependency.name}, which does not exist: submit it, or remove it from dependsOn"
    phase = parent.status.phase or "Pending"
    reached = {
        "Succeeded": phase == "Succeeded",
        "Running": phase == "Succeeded" or parent.status.start_time is not None,
        "Finished": phase in TERMINAL,
    }
    if reached[dependency.condition]:
        return ""
    reason = f", {parent.status.reason}" if parent.status.reason else ""
    return f"{dependency.name} to be {dependency.condition} (now {phase}{reason})"


def _failure(dependency: Dependency, parent: TorchrunJob) -> str:
    """Why the parent will never come so far, in words; nothing where it may."""
    phase = parent.status.phase
    if phase not in TERMINAL or not _wait(dependency, parent):
        return ""
    message = f": {parent.status.message}" if parent.status.message else ""
    return (
        f"{dependency.name} is {phase} and will not be {dependency.condition}"
        f" ({parent.status.reason}{message})"
    )


def _cycle(job: TorchrunJob, parents: Mapping[str, TorchrunJob]) -> tuple[str, ...]:
    """The shortest way from the job through its parents back to itself, both ends named."""
    own = job.metadata.name
    ways: list[tuple[str, ...]] = [(own,)]
    seen: set[str] = set()
    while ways:
        way = ways.pop(0)
        at = job if way[-1] == own else parents.get(way[-1])
        for dependency in at.spec.depends_on if at is not None else ():
            if dependency.name == own:
                return (*way, own)
            if dependency.name not in seen:
                seen.add(dependency.name)
                ways.append((*way, dependency.name))
    return ()
