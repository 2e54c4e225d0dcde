"""spec.dependsOn: the state that other jobs must reach before the first gang of this one.

The status records each dependency when it is first met. A job that has had a gang needs no parent.

Arguments `parents` are the jobs that this one depends on, by name and as far as they exist.
"""

from collections.abc import Callable, Iterable, Mapping

from msgspec import Struct

from torchrun_api.kinds.admission import Dependency, MetDependency
from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.status import TERMINAL
from torchrun_controller.reconcile.model.conditions import Reason
from torchrun_controller.reconcile.model.messages import sentence
from torchrun_controller.reconcile.model.phases import State

CONDITION = "DependenciesMet"
# A cycle of more jobs is not reported: they wait.
_LONGEST_CHAIN = 1_000


class UnmetDependencies(Struct, frozen=True):
    """Why the job does not start. It never starts if `state` is DEPENDENCY_FAILED."""

    state: State
    why: Reason


def find_unmet(
    job: TorchrunJob, parents: Mapping[str, TorchrunJob], waits_for: tuple[str, ...]
) -> UnmetDependencies | None:
    """Return why the first gang of the job is not created; None if all dependencies are met."""
    if not job.spec.depends_on:
        return None
    name = job.metadata.name
    if waits_for[-1:] == (name,):
        message = (
            f"spec.dependsOn contains a cycle: {' -> '.join((name, *waits_for))}. Remove one of"
            " these dependencies."
        )
        return UnmetDependencies(State.SPEC_INVALID, Reason("InvalidSpec", message))
    met_names = {record.name for record in find_met(job, parents)}
    unmet = [d for d in job.spec.depends_on if d.name not in met_names]
    if not unmet:
        return None
    missing_names = [d.name for d in unmet if d.name not in parents]
    existing_parents = [(d, parents[d.name]) for d in unmet if d.name in parents]
    for dependency, parent in existing_parents:
        failure = _describe_failure(dependency, parent)
        if failure:
            return UnmetDependencies(State.DEPENDENCY_FAILED, Reason("DependencyFailed", failure))
    sentences = [
        f"TorchrunJob {name} does not exist. Submit it or remove it from spec.dependsOn."
        for name in missing_names
    ]
    if existing_parents:
        waits = "; ".join(
            _describe_wait(dependency, parent) for dependency, parent in existing_parents
        )
        sentences.append(f"Waiting for {waits}.")
    reason = "DependencyNotFound" if missing_names else "WaitingForDependencies"
    return UnmetDependencies(State.DEPENDENCY_WAITING, Reason(reason, " ".join(sentences)))


def follow(
    job: TorchrunJob, find: Callable[[str], TorchrunJob | None], most: int = _LONGEST_CHAIN
) -> tuple[str, ...]:
    """Return the jobs that this one waits for: each is the first that the one before waits for.

    The last is the job itself in a cycle. A cycle through another dependency shows once all
    dependencies before that are met. So each reconcile follows one path, not all ancestors.
    """
    names: dict[str, None] = {}
    waiting: TorchrunJob | None = job
    while waiting is not None and waiting.status.workers is None and len(names) < most:
        unmet = (
            dependency.name
            for dependency in waiting.spec.depends_on
            if _find_record(waiting, dependency) is None
            and _evaluate(dependency, find(dependency.name)) is None
        )
        name = next(unmet, None)
        if name is None or name in names:
            break
        names[name] = None
        waiting = find(name) if name != job.metadata.name else None
    return tuple(names)


def find_met(job: TorchrunJob, parents: Mapping[str, TorchrunJob]) -> tuple[MetDependency, ...]:
    """Return the dependencies that are met or were met before, in the order of the spec.

    A dependency that was met remains met, because the TTL may have deleted its job. The record is
    dropped if an edit removes the dependency or changes its condition.
    """
    records = (
        _find_record(job, dependency) or _evaluate(dependency, parents.get(dependency.name))
        for dependency in job.spec.depends_on
    )
    return tuple(record for record in records if record is not None)


def are_met(job: TorchrunJob, parents: Mapping[str, TorchrunJob]) -> bool:
    """Whether every dependency is met or was met before."""
    return len(find_met(job, parents)) == len(job.spec.depends_on)


def describe_met(job: TorchrunJob) -> Reason | None:
    """Return the reason of the condition once all dependencies are met; None without any."""
    if not job.spec.depends_on:
        return None
    return Reason("DependenciesMet", "All dependencies are met.")


def have_recorded(dependents: Iterable[TorchrunJob], parent: TorchrunJob) -> bool:
    """Whether no dependent still needs the status of this finished parent."""
    return all(
        dependent.metadata.terminating
        or dependent.status.phase in TERMINAL
        or dependent.status.workers is not None
        or _has_recorded(dependent, parent.metadata.name)
        for dependent in dependents
    )


def _has_recorded(dependent: TorchrunJob, parent: str) -> bool:
    dependencies = (d for d in dependent.spec.depends_on if d.name == parent)
    return all(_find_record(dependent, dependency) is not None for dependency in dependencies)


def _find_record(job: TorchrunJob, dependency: Dependency) -> MetDependency | None:
    """Return the record of this dependency in the status of the job; None if it has none."""
    key = (dependency.name, dependency.condition)
    records = (r for r in job.status.dependencies_met if (r.name, r.condition) == key)
    return next(records, None)


def _evaluate(dependency: Dependency, parent: TorchrunJob | None) -> MetDependency | None:
    """Return a new record of a dependency whose parent has reached the condition, else None."""
    if parent is None or not _has_reached(dependency, parent):
        return None
    return MetDependency(
        name=dependency.name, condition=dependency.condition, uid=parent.metadata.uid
    )


def _has_reached(dependency: Dependency, parent: TorchrunJob) -> bool:
    """Whether the parent has reached the condition of the dependency."""
    phase = parent.status.phase
    if dependency.condition == "Finished":
        return phase in TERMINAL
    has_run = parent.status.start_time is not None
    return phase == "Succeeded" or (dependency.condition == "Running" and has_run)


def _describe_wait(dependency: Dependency, parent: TorchrunJob) -> str:
    phase = parent.status.phase or "Pending"
    reason = f", {parent.status.reason}" if parent.status.reason else ""
    return f"{dependency.name} to be {dependency.condition} (currently {phase}{reason})"


def _describe_failure(dependency: Dependency, parent: TorchrunJob) -> str:
    """Return why the parent will never reach the condition; "" if it may."""
    phase = parent.status.phase
    if phase not in TERMINAL or _has_reached(dependency, parent):
        return ""
    return sentence(
        f"TorchrunJob {dependency.name} is {phase} and cannot become {dependency.condition}"
        f" ({parent.status.reason}). {parent.status.message}"
    )
