"""TorchrunQueues: what is observed of one goes in, a QueuePlan comes out; pure, too."""

from datetime import datetime

from torchrun_controller.reconcile.model.observed import Defaults
from torchrun_controller.reconcile.queue import (
    finalizer,
    jobs,
    kai,
    queue_resources,
    status,
    template,
)
from torchrun_controller.reconcile.queue.model import ObservedQueue, QueuePlan, TemplateCheck

__all__ = ["ObservedQueue", "QueuePlan", "TemplateCheck", "reconcile_queue"]


def reconcile_queue(observed: ObservedQueue, now: datetime, defaults: Defaults) -> QueuePlan:
    """The next step of one queue. `now` is in UTC with whole seconds, as the API keeps times."""
    queue = observed.queue
    if queue.metadata.deletion_timestamp is not None:
        return finalizer.finalize(observed, now)
    checked = template.check_template(observed, defaults)
    if checked.condition is None:
        return QueuePlan(trial=checked.trial)
    if queue.invalid:
        # What the spec asks for is not known: nothing is made, and nothing removed.
        resources, kai_plan = (
            queue_resources.ResourcesPlan(statuses=queue.status.resources),
            kai.KaiQueuePlan(),
        )
    else:
        resources = queue_resources.plan_resources(observed)
        kai_plan = kai.plan_kai_queue(
            observed, idle=not any(jobs.runs(job) for job in observed.jobs)
        )
    composed = status.compose(observed, checked.condition, resources.statuses, kai_plan, now)
    changed = composed != status.present(observed)
    return QueuePlan(
        applies=(
            *finalizer.add_finalizer(observed),
            *resources.applies,
            *((kai_plan.apply,) if kai_plan.apply is not None else ()),
        ),
        deletes=(*resources.deletes, *kai_plan.deletes),
        status=composed if changed else None,
        events=status.events(observed, composed) if changed else (),
    )
