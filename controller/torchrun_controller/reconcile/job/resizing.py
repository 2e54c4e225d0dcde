"""A gang that is to be resized goes on while the gang of the new size waits for something."""

from msgspec.structs import replace

from torchrun_controller.reconcile.gang.decision import Decision, Writes
from torchrun_controller.reconcile.job.context import Context
from torchrun_controller.reconcile.job.running import add_reload, keep_running
from torchrun_controller.reconcile.model.conditions import Reason
from torchrun_controller.reconcile.model.messages import count_of, sentence


def delay_resize(context: Context, why: Reason, writes: Writes) -> Decision:
    """Return the decision on the running gang, with what its resize waits for.

    It has no probes: their room is of no use yet.
    """
    decision, outlook = keep_running(context), context.outlook
    assert outlook.nodes is not None, "a resize has a size"
    waiting = f"The resize to {count_of(outlook.nodes, 'node')} is waiting. {why.message}"
    condition = outlook.condition
    if condition is not None and not outlook.releases_nodes:
        condition = replace(condition, why=Reason(why.reason, waiting))
    return add_reload(
        context,
        replace(
            decision,
            why=Reason(decision.why.reason, f"{sentence(decision.why.message)} {waiting}"),
            conditions=(*decision.conditions, *((condition,) if condition else ())),
            writes=decision.writes.and_also(
                applies=writes.applies,
                deletes=writes.deletes,
                requeue_after=writes.requeue_after,
            ),
        ),
    )
