"""Whether the lost pods of the next gang are replaced alone, and why not if that is requested."""

from torchrun_controller.reconcile.gang.replacement import is_replacing
from torchrun_controller.reconcile.model.observed import Defaults, Observed, ObservedGang
from torchrun_controller.reconcile.pods import head_and_workers
from torchrun_controller.reconcile.schedulers.choice import choose
from torchrun_controller.reconcile.schedulers.table import SCHEDULERS
from torchrun_controller.reconcile.spec.errors import InvalidSpecError
from torchrun_controller.reconcile.spec.reliability import ResolvedReliability

_NO_EFFECT = "reliability.podReplacement Pod has no effect"


def find_obstacle(
    observed: Observed, policy: ResolvedReliability, defaults: Defaults
) -> str | None:
    """Return why podReplacement Pod has no effect on the next gang; None if it has, or is not set.

    A gang of one node has no others that could keep their pods, so nothing is missing there.
    """
    if not policy.replaces_pods:
        return None
    if policy.never_restart:
        return f"{_NO_EFFECT} with reliability.restartPolicy Never. Remove one of the two."
    if not policy.restarts_in_place:
        return f"{_NO_EFFECT} with reliability.restartScope Gang. Remove one of the two."
    if observed.job.spec.head is not None:
        return f"{_NO_EFFECT} on a job with spec.head. Remove podReplacement."
    if observed.cluster.nodes is None and not observed.cluster.nodes_awaited:
        return (
            f"{_NO_EFFECT}, because the controller has not read the nodes. It may not read them"
            " without a ClusterRole. Install one, or remove podReplacement."
        )
    if not defaults.progress_url:
        return (
            f"{_NO_EFFECT}, because the workers do not report to the controller. Install it for"
            " the whole cluster, or remove podReplacement."
        )
    return _scheduler_obstacle(observed)


def describe_present(gang: ObservedGang, policy: ResolvedReliability) -> str | None:
    """Return that podReplacement Pod has no effect on the present gang; None if it has.

    The Job of a gang has the answer that the controller gave when it created the gang.
    """
    child = gang.current_job
    has_others = head_and_workers.nodes_of(child) > 1
    if not (policy.replaces_pods and has_others) or is_replacing(child):
        return None
    return (
        f"{_NO_EFFECT} on the present gang, whose Job does not replace single pods. The next gang"
        " replaces them."
    )


def _scheduler_obstacle(observed: Observed) -> str | None:
    """Return why the gang scheduler does not allow it; None for an unknown one: no gang starts."""
    if observed.queue is None:
        return None
    try:
        gang = choose(observed.queue, observed.cluster.installed, observed.job).gang
    except InvalidSpecError:
        return None
    scheduler = SCHEDULERS[gang]
    if scheduler.places_single_pods:
        return None
    return (
        f"{_NO_EFFECT} with the gang scheduler {scheduler.api.title}, for which it is not tested."
        " Choose another queue, or remove podReplacement."
    )
