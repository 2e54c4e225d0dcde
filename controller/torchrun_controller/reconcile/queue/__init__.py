"""Reconciles one TorchrunQueue: ObservedQueue in, QueuePlan out. Pure: no I/O, no clock."""

from datetime import datetime

from torchrun_controller.reconcile.model.observed import Defaults
from torchrun_controller.reconcile.model.plan import Event
from torchrun_controller.reconcile.queue import finalizer, kai, status
from torchrun_controller.reconcile.queue.model import (
    ObservedQueue,
    QueuePlan,
    TemplateCheck,
    needs_queue,
)
from torchrun_controller.reconcile.queue.status import check_template

__all__ = ["ObservedQueue", "QueuePlan", "TemplateCheck", "reconcile_queue"]


def reconcile_queue(observed: ObservedQueue, now: datetime, defaults: Defaults) -> QueuePlan:
    """Return the next writes for one queue. `now` is in UTC with whole seconds, as in the API."""
    queue = observed.queue
    if queue.metadata.terminating:
        return finalizer.finalize(observed, now)
    if queue.incomplete:
        # A newer version may have written it: a status of this one would remove what it added.
        message = f"This version of the controller cannot read the queue: {queue.invalid}"
        return QueuePlan(events=(Event("Warning", "Unreadable", message),))
    check = check_template(observed, defaults)
    if check.condition is None:
        return QueuePlan(trial=check.trial)
    if queue.invalid:
        # The spec cannot be read: nothing is created, and nothing deleted.
        kai_plan = kai.KaiQueuePlan()
    else:
        kai_plan = kai.plan_kai_queue(
            observed, defaults, idle=not any(needs_queue(job) for job in observed.jobs)
        )
    composed = status.compose(observed, check.condition, kai_plan, now)
    changed = composed != status.own_part(observed)
    return QueuePlan(
        applies=(
            *finalizer.set_finalizer(observed),
            *((kai_plan.apply,) if kai_plan.apply is not None else ()),
        ),
        deletes=kai_plan.deletes,
        status=composed if changed else None,
        events=status.events(observed, composed) if changed else (),
    )
