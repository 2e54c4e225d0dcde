"""The status of a queue: phase, conditions, counts and what became of its objects."""

from datetime import datetime

from msgspec.structs import replace

from torchrun_api.admission import QueueResourceStatus
from torchrun_api.meta import Condition
from torchrun_api.queue import TorchrunQueueStatus
from torchrun_controller.reconcile.model.conditions import ConditionUpdate, Reason, update
from torchrun_controller.reconcile.model.plan import Event
from torchrun_controller.reconcile.queues import extras, gang, jobs, kai, template
from torchrun_controller.reconcile.queues.observed import ObservedQueue
from torchrun_controller.reconcile.schedulers.choice import Choice

READY = "Ready"
RESOURCES = "ResourcesReady"
# Those that this controller writes; others have managers of their own.
OURS = frozenset({READY, RESOURCES, template.CONDITION, kai.CONDITION})

TERMINATING = "Terminating"
READY_REASON = Reason("Ready", "jobs of this queue run by its present spec")
PAUSED = Reason(
    "Paused", "spec.weight is 0: what runs goes on, nothing new is admitted; set a weight to go on"
)


def compose(
    observed: ObservedQueue,
    judged: ConditionUpdate,
    resources: tuple[QueueResourceStatus, ...],
    mapped: kai.Mapped,
    now: datetime,
) -> TorchrunQueueStatus:
    """The status of a queue that stays."""
    parts = [judged, _resources(resources), mapped.claim]
    choice = gang.choice_of(observed)
    obstacle = _obstacle(judged, resources, mapped, choice)
    paused = observed.queue.spec.weight == 0
    why = obstacle or (PAUSED if paused else READY_REASON)
    ready = ConditionUpdate(READY, "True" if why is READY_REASON else "False", why)
    claims = [ready, *(claim for claim in parts if claim is not None)]
    told = _told(observed, "Active" if obstacle is None else "Updating", claims, resources, now)
    return replace(told, gang=choice.gang if choice is not None else None)


def terminating(observed: ObservedQueue, message: str, now: datetime) -> TorchrunQueueStatus:
    """The status of a queue that waits for its end."""
    known = [
        ConditionUpdate(c.type, c.status, Reason(c.reason, c.message))
        for c in observed.queue.status.conditions
        if c.type in OURS - {READY}
    ]
    claims = [ConditionUpdate(READY, "False", Reason(TERMINATING, message)), *known]
    told = _told(observed, "Terminating", claims, observed.queue.status.resources, now)
    return replace(told, gang=observed.queue.status.gang)


def present(observed: ObservedQueue) -> TorchrunQueueStatus:
    """What stands in the status of that which is written here, in the order it is composed in."""
    status = observed.queue.status
    ours = sorted((c for c in status.conditions if c.type in OURS), key=lambda c: c.type)
    resources = tuple(sorted(status.resources, key=lambda r: r.name))
    return replace(status, conditions=tuple(ours), resources=resources, admission=None)


def events(observed: ObservedQueue, composed: TorchrunQueueStatus) -> tuple[Event, ...]:
    """One event where a condition or an object has come to stand badly, and one for a change."""
    before = observed.queue.status
    known = {(c.type, c.status, c.reason) for c in before.conditions}
    conditions = [
        Event("Normal" if c.type == READY else "Warning", c.reason, c.message)
        for c in composed.conditions
        if c.status == "False" and _tells(c) and (c.type, c.status, c.reason) not in known
    ]
    objects = [
        Event("Warning", "ResourceNotReady", f"spec.resources {r.name}: {r.message}")
        for r in composed.resources
        if not r.ready and r.message not in extras.PASSING and r not in before.resources
    ]
    return (*_changed(observed), *conditions, *objects)


def _tells(condition: Condition) -> bool:
    """Ready sums up what others tell, but for a pause and the end; objects tell for themselves."""
    if condition.type == READY:
        return condition.reason in (PAUSED.reason, TERMINATING)
    return condition.type != RESOURCES


def _changed(observed: ObservedQueue) -> list[Event]:
    """That a change of the spec comes too late for what runs."""
    meta, seen = observed.queue.metadata, observed.queue.status.observed_generation
    running = sum(jobs.runs(job) for job in observed.jobs)
    if not running or not 0 < seen < meta.generation or meta.deletion_timestamp is not None:
        return []
    told = f"applies to jobs and attempts that start later; {running} running keep theirs"
    return [Event("Normal", "QueueChanged", told)]


def _told(
    observed: ObservedQueue,
    phase: str,
    claims: list[ConditionUpdate],
    resources: tuple[QueueResourceStatus, ...],
    now: datetime,
) -> TorchrunQueueStatus:
    queue = observed.queue
    generation = queue.metadata.generation
    conditions = update(queue.status.conditions, claims, generation, now)
    assert phase in ("Active", "Updating", "Terminating")
    return TorchrunQueueStatus(
        observed_generation=generation,
        phase=phase,  # type: ignore[arg-type]
        conditions=tuple(sorted(conditions, key=lambda c: c.type)),
        jobs=jobs.count(observed.jobs),
        resources=tuple(sorted(resources, key=lambda r: r.name)),
    )


def _resources(resources: tuple[QueueResourceStatus, ...]) -> ConditionUpdate | None:
    if not resources:
        return None
    waiting = [r for r in resources if not r.ready]
    if not waiting:
        return ConditionUpdate(
            RESOURCES, "True", Reason("AllReady", "every object is as its template says")
        )
    told = "; ".join(f"{r.name}: {r.message}" for r in waiting)
    if all(r.message in extras.PASSING for r in waiting):
        return ConditionUpdate(RESOURCES, "Unknown", Reason("InProgress", told))
    return ConditionUpdate(RESOURCES, "False", Reason("NotReady", told))


def _obstacle(
    judged: ConditionUpdate,
    resources: tuple[QueueResourceStatus, ...],
    mapped: kai.Mapped,
    choice: Choice | None,
) -> Reason | None:
    """Why jobs cannot run as the spec says; the first that holds."""
    if judged.status == "False":
        return Reason("TemplateInvalid", judged.why.message)
    objects = _resources(resources)
    if objects is not None and objects.status != "True":
        return Reason("ResourcesNotReady", objects.why.message)
    if not mapped.usable:
        assert mapped.claim is not None
        return Reason("KaiQueueNotReady", mapped.claim.why.message)
    return choice.missing if choice is not None else None
