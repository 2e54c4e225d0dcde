"""TorchrunQueues: what is observed of one goes in, a QueuePlan comes out; pure, too."""

from datetime import datetime

from torchrun_controller.reconcile.model.observed import Defaults
from torchrun_controller.reconcile.queues import extras, jobs, kai, leave, status, template
from torchrun_controller.reconcile.queues.observed import ObservedQueue, QueuePlan, Verdict

__all__ = ["ObservedQueue", "QueuePlan", "Verdict", "reconcile_queue"]


def reconcile_queue(observed: ObservedQueue, now: datetime, defaults: Defaults) -> QueuePlan:
    """The next step of one queue. `now` is in UTC with whole seconds, as the API keeps times."""
    queue = observed.queue
    if queue.metadata.deletion_timestamp is not None:
        return leave.leave(observed, now)
    judged = template.judge(observed, defaults)
    if judged.claim is None:
        return QueuePlan(trial=judged.trial)
    if queue.invalid:
        # What the spec asks for is not known: nothing is made, and nothing removed.
        kept, mapped = extras.Kept(statuses=queue.status.resources), kai.Mapped()
    else:
        kept = extras.keep(observed)
        mapped = kai.keep(observed, idle=not any(jobs.runs(job) for job in observed.jobs))
    composed = status.compose(observed, judged.claim, kept.statuses, mapped, now)
    changed = composed != status.present(observed)
    return QueuePlan(
        applies=(
            *leave.hold(observed),
            *kept.applies,
            *((mapped.apply,) if mapped.apply is not None else ()),
        ),
        deletes=(*kept.deletes, *mapped.deletes),
        status=composed if changed else None,
        events=status.events(observed, composed) if changed else (),
    )
