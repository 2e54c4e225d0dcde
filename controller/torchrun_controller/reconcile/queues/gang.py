"""Who sees to the gangs of a queue, as far as the queue itself says."""

from torchrun_controller.reconcile.queues.observed import ObservedQueue
from torchrun_controller.reconcile.schedulers.choice import Choice, choose
from torchrun_controller.reconcile.spec.errors import InvalidSpecError


def choice_of(observed: ObservedQueue) -> Choice | None:
    """The choice for jobs that name no scheduler of their own; None while it cannot be made."""
    if observed.installed is None:
        return None
    try:
        return choose(observed.queue, observed.installed)
    except InvalidSpecError:
        return None
