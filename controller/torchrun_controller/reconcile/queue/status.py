"""The status of a queue: phase, conditions and counts.

The API server validates what CEL cannot: a sample Job, merged like that of any worker, is sent as a
dry run. The condition TemplateValid stores the result until the spec changes.
"""

from datetime import datetime

from msgspec import Struct
from msgspec.structs import replace

from torchrun_api.kinds.job import TorchrunJob, TorchrunJobSpec
from torchrun_api.kinds.meta import Condition, ObjectMeta
from torchrun_api.kinds.queue import TorchrunQueue, TorchrunQueueStatus
from torchrun_controller.reconcile.model.conditions import ConditionUpdate, Reason, update
from torchrun_controller.reconcile.model.observed import Defaults
from torchrun_controller.reconcile.model.plan import Apply, Event
from torchrun_controller.reconcile.objects.child_job import child_job, worker_template
from torchrun_controller.reconcile.queue import kai
from torchrun_controller.reconcile.queue.model import (
    ObservedQueue,
    TemplateCheck,
    choose_scheduler,
    count_jobs,
    needs_queue,
)
from torchrun_controller.reconcile.schedulers.table import Choice, choose
from torchrun_controller.reconcile.spec import pod_template
from torchrun_controller.reconcile.spec.errors import InvalidSpecError
from torchrun_controller.reconcile.spec.resolve import resolve

TEMPLATE_VALID = "TemplateValid"
READY = "Ready"
# The conditions of this manager; other conditions have managers of their own.
OURS = frozenset({READY, TEMPLATE_VALID, kai.CONDITION})

TERMINATING = "Terminating"
RUNS_JOBS = Reason("Ready", "Jobs of this queue use the current spec.")
PAUSED = Reason(
    "Paused", "spec.weight is 0. Running jobs continue; no job is admitted. Set a weight to resume."
)


class TemplateState(Struct, frozen=True):
    """The condition, or the dry run that decides it."""

    condition: ConditionUpdate | None = None
    trial: Apply | None = None


def check_template(observed: ObservedQueue, defaults: Defaults) -> TemplateState:
    """Return the condition of the template, or the dry run that is missing for it."""
    queue = observed.queue
    if queue.invalid:
        return TemplateState(_template_condition("False", "InvalidSpec", queue.invalid))
    check = observed.template_check
    if check is not None and check.generation == queue.metadata.generation:
        return TemplateState(_check_condition(check))
    condition = _stored_condition(queue)
    if condition is not None:
        return TemplateState(
            ConditionUpdate(
                TEMPLATE_VALID, condition.status, Reason(condition.reason, condition.message)
            )
        )
    try:
        pod_template.check(queue)
        choose(queue, observed.installed)
        return TemplateState(trial=sample_job(queue, defaults))
    except InvalidSpecError as error:
        return TemplateState(_template_condition("False", "InvalidSpec", str(error)))


def sample_job(queue: TorchrunQueue, defaults: Defaults) -> Apply:
    """Build the Job of one worker from a queue's template.

    Raises:
        InvalidSpecError: no Job can be built from the template.
    """
    job = TorchrunJob(
        # The dry run creates nothing, but the name must be free.
        metadata=ObjectMeta(
            name=f"template-{queue.metadata.uid[:8]}", namespace=queue.metadata.namespace
        ),
        spec=TorchrunJobSpec(
            job_queue=queue.metadata.name,
            num_nodes=1,
            command=("true",),
            # The queue may leave the image to its jobs.
            image=queue.spec.image or "image",
        ),
    )
    spec = resolve(job, queue)
    template = worker_template(job, queue, spec, None, 0, "0", defaults)
    apply = child_job(job, spec, 0, template, {})
    metadata = {"name": job.metadata.name, "namespace": job.metadata.namespace}
    return replace(apply, body={**apply.body, "metadata": metadata})


def _check_condition(check: TemplateCheck) -> ConditionUpdate:
    match check.accepted:
        case "True":
            return _template_condition(
                "True", "Accepted", "The API server accepts a Job created from the template."
            )
        case "False":
            return _template_condition(
                "False",
                "Rejected",
                f"The API server rejects a Job created from the template: {check.message}",
            )
        case _:
            return _template_condition(
                "Unknown", "NotChecked", f"The template is not checked yet: {check.message}"
            )


def _stored_condition(queue: TorchrunQueue) -> Condition | None:
    """Return a positive result for the present spec from the status; others are tried again."""
    return next(
        (
            condition
            for condition in queue.status.conditions
            if condition.type == TEMPLATE_VALID
            and condition.status == "True"
            and condition.observed_generation == queue.metadata.generation
        ),
        None,
    )


def _template_condition(status: str, reason: str, message: str) -> ConditionUpdate:
    assert status in ("True", "False", "Unknown")
    return ConditionUpdate(TEMPLATE_VALID, status, Reason(reason, message))  # type: ignore[arg-type]


def compose(
    observed: ObservedQueue,
    template_condition: ConditionUpdate,
    kai_plan: kai.KaiQueuePlan,
    now: datetime,
) -> TorchrunQueueStatus:
    """Return the status of a queue that is not being deleted."""
    parts = [template_condition, kai_plan.condition]
    choice = choose_scheduler(observed)
    obstacle = _obstacle(template_condition, kai_plan, choice)
    is_paused = observed.queue.spec.weight == 0
    why = obstacle or (PAUSED if is_paused else RUNS_JOBS)
    ready_update = ConditionUpdate(READY, "True" if why is RUNS_JOBS else "False", why)
    updates = [ready_update, *(part for part in parts if part is not None)]
    status = _status(observed, "Active" if obstacle is None else "Updating", updates, now)
    return replace(status, gang=choice.gang if choice is not None else None)


def compose_terminating(
    observed: ObservedQueue, message: str, now: datetime
) -> TorchrunQueueStatus:
    """Return the status of a queue whose deletion waits."""
    other_updates = [
        ConditionUpdate(c.type, c.status, Reason(c.reason, c.message))
        for c in observed.queue.status.conditions
        if c.type in OURS - {READY}
    ]
    updates = [ConditionUpdate(READY, "False", Reason(TERMINATING, message)), *other_updates]
    status = _status(observed, "Terminating", updates, now)
    return replace(status, gang=observed.queue.status.gang)


def own_part(observed: ObservedQueue) -> TorchrunQueueStatus:
    """Return the part of the present status that this manager writes, in the order of compose."""
    status = observed.queue.status
    ours = sorted((c for c in status.conditions if c.type in OURS), key=lambda c: c.type)
    return replace(status, conditions=tuple(ours), admission=None)


def events(observed: ObservedQueue, composed: TorchrunQueueStatus) -> tuple[Event, ...]:
    """Return one event for each new bad condition, and one for a change of the spec."""
    before = observed.queue.status
    old_conditions = {(c.type, c.status, c.reason) for c in before.conditions}
    conditions = [
        Event("Normal" if c.type == READY else "Warning", c.reason, c.message)
        for c in composed.conditions
        if c.status == "False"
        and _has_event(c)
        and (c.type, c.status, c.reason) not in old_conditions
    ]
    return (*_change_event(observed), *conditions)


def _has_event(condition: Condition) -> bool:
    """Whether the condition has events: Ready repeats the reasons of others."""
    return condition.type != READY or condition.reason in (PAUSED.reason, TERMINATING)


def _change_event(observed: ObservedQueue) -> list[Event]:
    """Return the event that a change of the spec does not apply to running jobs."""
    meta, observed_generation = observed.queue.metadata, observed.queue.status.observed_generation
    running_count = sum(needs_queue(job) for job in observed.jobs)
    if not running_count or not 0 < observed_generation < meta.generation or meta.terminating:
        return []
    message = (
        "The change applies to jobs and attempts that start later. Running jobs that keep the"
        f" previous spec: {running_count}."
    )
    return [Event("Normal", "QueueChanged", message)]


def _status(
    observed: ObservedQueue,
    phase: str,
    updates: list[ConditionUpdate],
    now: datetime,
) -> TorchrunQueueStatus:
    queue = observed.queue
    generation = queue.metadata.generation
    conditions = update(queue.status.conditions, updates, generation, now)
    assert phase in ("Active", "Updating", "Terminating")
    return TorchrunQueueStatus(
        observed_generation=generation,
        phase=phase,  # type: ignore[arg-type]
        conditions=tuple(sorted(conditions, key=lambda c: c.type)),
        jobs=count_jobs(observed.jobs),
    )


def _obstacle(
    template_condition: ConditionUpdate,
    kai_plan: kai.KaiQueuePlan,
    choice: Choice | None,
) -> Reason | None:
    """Return the first reason why jobs cannot run by the present spec; None if they can."""
    if template_condition.status == "False":
        return Reason("TemplateInvalid", template_condition.why.message)
    if not kai_plan.usable:
        assert kai_plan.condition is not None
        return Reason("KaiQueueNotReady", kai_plan.condition.why.message)
    return choice.missing if choice is not None else None
