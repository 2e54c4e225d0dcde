"""Workers of old gangs that nobody ends: their Job was deleted without them, or is another's now.

They may train on and write checkpoints, so the next gang waits for them. They are not deleted: only
a person knows whether they were kept on purpose.
"""

from torchrun_api.core import Pod
from torchrun_api.kinds import JOBS
from torchrun_controller.reconcile.model.observed import Observed
from torchrun_controller.reconcile.pods.lifecycle import alive

NAMED = 4  # pods in a message


def orphans(observed: Observed) -> tuple[Pod, ...]:
    """Workers that run and that nobody is going to end.

    One whose Job is gone is not among them: the garbage collector ends it.
    """
    foreign = {c.name for c in observed.refused.conflicts if c.resource == JOBS.resource}
    return tuple(
        pod
        for pod in observed.gang.stale_pods
        if alive(pod) and not pod.metadata.terminating
        if all(owner.name in foreign for owner in pod.metadata.owner_references if owner.controller)
    )


def way_out(pods: tuple[Pod, ...]) -> str:
    """What to do about orphans; "" for none."""
    if not pods:
        return ""
    first = sorted(pod.metadata.name for pod in pods)[:NAMED]
    more = f", and {len(pods) - NAMED} more" if len(pods) > NAMED else ""
    return (
        f"{len(pods)} workers have no Job of this TorchrunJob, so nobody ends them and they may"
        " train on; end them yourself: kubectl delete pod"
        f" -n {pods[0].metadata.namespace} {' '.join(first)}{more}"
    )
