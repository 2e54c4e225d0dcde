"""spec.dependsOn: the state that other jobs must reach before the first gang of this one.

The status records each dependency when it is first met. A job that has had a gang needs no parent.
"""

from collections.abc import Iterable, Mapping

from msgspec import Struct

from torchrun_api.admission import Dependency, MetDependency
from torchrun_api.job import TorchrunJob
from torchrun_api.status import TERMINAL
from torchrun_controller.reconcile.gang import gang
from torchrun_controller.reconcile.model.conditions import Reason
from torchrun_controller.reconcile.model.messages import sentence
from torchrun_controller.reconcile.model.observed import Observed
from torchrun_controller.reconcile.model.phases import State

CONDITION = "DependenciesMet"


class Hold(Struct, frozen=True):
    """Why the job may not start: for now, or (DEPENDENCY_FAILED) for ever."""

    state: State
    why: Reason


def hold(observed: Observed) -> Hold | None:
    """What keeps the job back; None where nothing does, or a gang was made already."""
    job, parents = observed.job, observed.parents
    if not job.spec.depends_on or gang.was_created(job, observed.gang):
        return None
    cycle = _cycle(job, parents)
    if cycle:
        message = (
            f"spec.dependsOn contains a cycle: {' -> '.join(cycle)}. Remove one of these"
            " dependencies."
        )
        return Hold(State.SPEC_INVALID, Reason("InvalidSpec", message))
    known = {one.name for one in met(observed)}
    unmet = [dependency for dependency in job.spec.depends_on if dependency.name not in known]
    failed = [_failure(d, parents[d.name]) for d in unmet if d.name in parents]
    lost = next((message for message in failed if message), "")
    if lost:
        return Hold(State.DEPENDENCY_FAILED, Reason("DependencyFailed", lost))
    if not unmet:
        return None
    missing = [dependency.name for dependency in unmet if dependency.name not in parents]
    waits = [_wait(d, parents[d.name]) for d in unmet if d.name in parents]
    sentences = [
        f"TorchrunJob {name} does not exist. Submit it or remove it from spec.dependsOn."
        for name in missing
    ]
    if waits:
        sentences.append(f"Waiting for {'; '.join(waits)}.")
    reason = "DependencyNotFound" if missing else "WaitingForDependencies"
    return Hold(State.DEPENDENCY_WAITING, Reason(reason, " ".join(sentences)))


def met(observed: Observed) -> tuple[MetDependency, ...]:
    """Dependencies that are met now or were before, in the order of the spec.

    One that was met stays so: a TTL may have removed its job since. An edit that asks for another
    condition, or removes a dependency, forgets it.
    """
    known = {(one.name, one.condition): one for one in observed.job.status.dependencies_met}
    found = (
        known.get((dependency.name, dependency.condition))
        or _met_now(dependency, observed.parents.get(dependency.name))
        for dependency in observed.job.spec.depends_on
    )
    return tuple(one for one in found if one is not None)


def are_recorded(job: TorchrunJob, dependents: Iterable[TorchrunJob]) -> bool:
    """Whether each job that depends on this finished one shows in its status how it ended."""
    return all(
        dependent.metadata.terminating
        or dependent.status.phase in TERMINAL
        or dependent.status.workers is not None
        or _records(dependent, job.metadata.name)
        for dependent in dependents
    )


def _records(dependent: TorchrunJob, parent: str) -> bool:
    recorded = {(one.name, one.condition) for one in dependent.status.dependencies_met}
    edges = (edge for edge in dependent.spec.depends_on if edge.name == parent)
    return all((edge.name, edge.condition) in recorded for edge in edges)


def why_met(observed: Observed) -> Reason | None:
    """That nothing is waited for; None for a job that depends on none."""
    if not observed.job.spec.depends_on:
        return None
    return Reason("DependenciesMet", "All dependencies are met.")


def why_gang(observed: Observed) -> Reason | None:
    """The same of a gang that exists: the status with which it was created may be lost."""
    every_one = len(met(observed)) == len(observed.job.spec.depends_on)
    return why_met(observed) if every_one else None


def _met_now(dependency: Dependency, parent: TorchrunJob | None) -> MetDependency | None:
    if parent is None or _wait(dependency, parent):
        return None
    return MetDependency(
        name=dependency.name, condition=dependency.condition, uid=parent.metadata.uid
    )


def _wait(dependency: Dependency, parent: TorchrunJob) -> str:
    """What the parent has still to do, in words; nothing where it is done."""
    phase = parent.status.phase or "Pending"
    reached = {
        "Succeeded": phase == "Succeeded",
        "Running": phase == "Succeeded" or parent.status.start_time is not None,
        "Finished": phase in TERMINAL,
    }
    if reached[dependency.condition]:
        return ""
    reason = f", {parent.status.reason}" if parent.status.reason else ""
    return f"{dependency.name} to be {dependency.condition} (currently {phase}{reason})"


def _failure(dependency: Dependency, parent: TorchrunJob) -> str:
    """Why the parent will never come so far, in words; nothing where it may."""
    phase = parent.status.phase
    if phase not in TERMINAL or not _wait(dependency, parent):
        return ""
    return sentence(
        f"TorchrunJob {dependency.name} is {phase} and cannot become {dependency.condition}"
        f" ({parent.status.reason}). {parent.status.message}"
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
