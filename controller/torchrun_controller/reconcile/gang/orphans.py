"""Orphans: pods of old gangs without a Job of this TorchrunJob, so nothing deletes them.

A user deleted their Job and kept the pods (--cascade=orphan), or a Job of that name now has another
owner. They may still train and write checkpoints, so the next gang waits for them. The controller
does not delete them: the user may have kept them on purpose.
"""

from torchrun_api.core import Pod
from torchrun_api.kinds import JOBS
from torchrun_controller.reconcile.model.messages import count_of, list_names
from torchrun_controller.reconcile.model.observed import ObservedGang, RefusedWrites
from torchrun_controller.reconcile.pods.lifecycle import alive


def find_orphans(gang: ObservedGang, refused: RefusedWrites) -> tuple[Pod, ...]:
    """Return the orphans that run. The garbage collector deletes pods whose Job is gone."""
    foreign = {c.name for c in refused.conflicts if c.resource == JOBS.resource}
    return tuple(
        pod
        for pod in gang.stale_pods
        if alive(pod) and not pod.metadata.terminating
        if all(owner.name in foreign for owner in pod.metadata.owner_references if owner.controller)
    )


def orphan_advice(pods: tuple[Pod, ...]) -> str:
    """Return what the user can do about these orphans; "" for none."""
    if not pods:
        return ""
    pod_names = list_names((pod.metadata.name for pod in pods), separator=" ")
    verb, pronoun = ("is", "it") if len(pods) == 1 else ("are", "them")
    return (
        f"{count_of(len(pods), 'pod')} {verb} not controlled by a Job of this TorchrunJob and may"
        f" still train. Delete {pronoun} (kubectl delete pod"
        f" -n {pods[0].metadata.namespace} {pod_names})."
    )
