"""The deletion of sync and setup pods that are no longer needed."""

from collections.abc import Iterable

from torchrun_api.core import Pod
from torchrun_api.job import TorchrunJob
from torchrun_controller.reconcile.model.observed import ObservedWorkspace
from torchrun_controller.reconcile.model.plan import Delete
from torchrun_controller.reconcile.pods.lifecycle import alive, delete_pod
from torchrun_controller.reconcile.workspace import delivery, sync_results

KEPT_SYNC_PODS = 3


def delete_oldest_pods(job: TorchrunJob, workspace: ObservedWorkspace) -> tuple[Delete, ...]:
    """Delete sync pods to make room for one more; the last complete one stays."""
    complete = sync_results.find_complete_pods(job, workspace)[-1:]
    oldest_pods = workspace.sync_pods[: -KEPT_SYNC_PODS + 1]
    return tuple(delete_pod(pod) for pod in oldest_pods if pod not in complete)


def end_preparations(workspace: ObservedWorkspace, *, serving: bool = True) -> tuple[Delete, ...]:
    """Delete running sync and setup pods; serve pods only if `serving`."""
    sync_pods = [p for p in workspace.sync_pods if serving or not delivery.is_serve_pod(p)]
    return end_pods((*sync_pods, *workspace.setup_pods))


def end_pods(pods: Iterable[Pod]) -> tuple[Delete, ...]:
    """Delete those of the pods that run and are not being deleted."""
    return tuple(delete_pod(p) for p in pods if alive(p) and not p.metadata.terminating)
