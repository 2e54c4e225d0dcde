"""Delivery of a workspace to the workers: from a shared PVC, or from a pod that serves it.

A serve pod is a sync pod that keeps running: it receives the upload in the same way, then serves
the result. It stores the workspace on the PVC if only this pod has to mount it, else on ephemeral
storage of its own.

The scheduler does not know where a PVC that only one machine can mount is mounted, and a pod on
another machine does not start as long as a pod on the first one runs. The pods that use such a PVC
run on the same machine.
"""

from datetime import datetime, timedelta

import msgspec

from torchrun_api import names
from torchrun_api.kinds.core import ContainerStatus, PersistentVolumeClaim, Pod
from torchrun_api.kinds.job import TorchrunJob
from torchrun_controller.reconcile.model.conditions import Reason, find_condition
from torchrun_controller.reconcile.model.messages import sentence
from torchrun_controller.reconcile.model.observed import (
    Observed,
    ObservedCluster,
    ObservedGang,
    ObservedWorkspace,
)
from torchrun_controller.reconcile.objects.sync_pod import Store
from torchrun_controller.reconcile.pods import head_and_workers, nodes, waiting
from torchrun_controller.reconcile.pods.lifecycle import PodState, alive, state_of
from torchrun_controller.reconcile.spec.resolve import VolumeSource
from torchrun_controller.reconcile.workspace import claims
from torchrun_controller.reconcile.workspace.claims import find_claim

# Time for the PVC of a pod to be bound. A slower storage class needs delivery: shared.
BINDING_TIMEOUT = timedelta(seconds=30)
DIRECT_DELIVERY = "DirectDelivery"


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """The route to the workers. `store` is where a serve pod keeps the workspace, "" for no such
    pod.

    `why` is why there is no shared PVC. `binding_seconds` are those in which the PVC may still be
    bound.
    """

    store: Store
    why: str = ""
    binding_seconds: float | None = None


def choose_route(
    job: TorchrunJob,
    workspace: ObservedWorkspace,
    cluster: ObservedCluster,
    source: VolumeSource,
    now: datetime,
) -> Route:
    """Choose the route from the state of the PVC and of the latest sync pod.

    A pod with ephemeral storage has the only copy, so a PVC that is bound late changes nothing.
    """
    is_direct = source.delivery == "direct"
    if source.delivery == "shared":
        return Route(store="")
    why_direct = "Delivery is direct."
    latest, claim = workspace.latest_sync_pod, find_claim(workspace.claims, source.name)
    is_pending = claim is not None and claim.status.phase == "Pending"
    is_abandoned = is_pending and not (latest and alive(latest)) and is_recorded_direct(job)
    if is_ephemeral(workspace) or is_abandoned:
        why = why_direct if is_direct else f"PVC {source.name} is not bound."
        return Route(store="ephemeral", why=why)
    failure, seconds = _check_binding(workspace, cluster, claim, now)
    if failure:
        return Route(store="ephemeral", why=failure)
    return Route(
        store="claim" if is_direct else "",
        why=why_direct if is_direct else "",
        binding_seconds=seconds,
    )


def is_ephemeral(workspace: ObservedWorkspace) -> bool:
    """Whether the latest sync pod keeps the workspace on ephemeral storage."""
    latest = workspace.latest_sync_pod
    return latest is not None and latest.metadata.annotations.delivery == "ephemeral"


def is_recorded_direct(job: TorchrunJob) -> bool:
    """Whether the status records direct delivery; the pod that shows it may be gone."""
    condition = find_condition(job.status.conditions, "WorkspaceReady")
    return condition is not None and condition.reason == DIRECT_DELIVERY


def is_served(job: TorchrunJob, workspace: ObservedWorkspace) -> bool:
    """Whether the present gang gets its workspace from a serve pod, which may be lost.

    The pod shows it if the status does not: the gang may be older than any status.
    """
    latest = workspace.latest_sync_pod
    return is_recorded_direct(job) or (latest is not None and is_serve_pod(latest))


def _check_binding(
    workspace: ObservedWorkspace,
    cluster: ObservedCluster,
    claim: PersistentVolumeClaim | None,
    now: datetime,
) -> tuple[str, float | None]:
    """Return why the PVC will not be bound, or the seconds until BINDING_TIMEOUT.

    The time counts only while a sync pod waits for the PVC.
    """
    pod = workspace.latest_sync_pod
    if claim is None or claim.status.phase != "Pending" or pod is None:
        return "", None
    failure = waiting.binding_failure(claim, cluster.warnings)
    if failure is not None:
        return failure.message, None
    since = pod.metadata.creation_timestamp
    why = waiting.pod_reason(pod, (claim,), cluster.warnings)
    if not alive(pod) or since is None or (why is not None and why.reason != "ClaimPending"):
        return "", None
    seconds = (since + BINDING_TIMEOUT - now).total_seconds()
    if seconds > 0:
        return "", seconds
    return f"PVC {claim.metadata.name} is not bound after {BINDING_TIMEOUT.seconds} s.", None


def is_serve_pod(pod: Pod) -> bool:
    """Whether this is a serve pod."""
    return bool(pod.metadata.annotations.delivery)


def is_serving(pod: Pod) -> bool:
    """Whether a serve pod has the whole workspace and serves it."""
    is_ready = _container_status(pod, names.SERVE_CONTAINER).ready
    # The pod's own Ready stays False once its sync container has exited.
    return has_content(pod) and is_ready and bool(pod.status.pod_ip)


def accepts_upload(pod: Pod) -> bool:
    """Whether the pod listens for an upload; a running pod may not listen yet."""
    return _container_status(pod, names.SYNC_CONTAINER).ready


def has_content(pod: Pod) -> bool:
    """Whether the workspace of a pod is complete, and its storage still exists."""
    if not is_serve_pod(pod):
        return pod.status.phase == "Succeeded"
    return has_received(pod) and state_of(pod) is PodState.ACTIVE


def has_received(pod: Pod) -> bool:
    """Whether the workspace of a pod was complete once, even if the pod is lost now."""
    sync_end = _container_status(pod, names.SYNC_CONTAINER).state.terminated
    return pod.status.phase == "Succeeded" or (sync_end is not None and sync_end.exit_code == 0)


def _container_status(pod: Pod, name: str) -> ContainerStatus:
    statuses = (status for status in pod.status.container_statuses if status.name == name)
    return next(statuses, ContainerStatus())


def serve_url(pod: Pod) -> str:
    """Return the URL from which workers fetch the workspace."""
    address = pod.status.pod_ip
    host = f"[{address}]" if ":" in address else address
    return f"http://{host}:{names.SERVE_PORT}"


def describe_delivery(pod: Pod, why: str) -> Reason:
    """Return the reason of a workspace that is ready on its serve pod."""
    name = pod.metadata.labels.torchrun_job
    message = f"{sentence(why)} Pods fetch the workspace from pod {names.serve_pod(name)}."
    return Reason(DIRECT_DELIVERY, message)


def describe_unrecorded_delivery(pod: Pod) -> Reason | None:
    """Return the same if no status has it yet; None if the pod no longer has the workspace."""
    if not has_content(pod):
        return None
    on_claim = pod.metadata.annotations.delivery == "claim"
    return describe_delivery(pod, "Delivery is direct." if on_claim else "No PVC is bound.")


def mounted_claims(
    job: TorchrunJob, gang: ObservedGang, workspace: ObservedWorkspace
) -> tuple[PersistentVolumeClaim, ...]:
    """Return the PVCs that the workers mount; without a gang, those that the next one may mount.

    That is not the PVC of a workspace which is served.
    """
    if gang.child_jobs:
        mounted = head_and_workers.claims_of(gang)
        return tuple(claim for claim in workspace.claims if claim.metadata.name in mounted)
    latest = workspace.latest_sync_pod
    if latest is None or not is_serve_pod(latest):
        return workspace.claims
    served_name = names.workspace_claim(job.metadata.name)
    return tuple(claim for claim in workspace.claims if claim.metadata.name != served_name)


def find_claim_nodes(
    observed: Observed, source: VolumeSource, store: str, now: datetime
) -> tuple[str, ...] | None:
    """Return the machines where a pod with this store has to run; None if it may run on any.

    A serve pod runs where others serve from the PVC. A sync pod follows the workers and the setup
    pods, so there is no machine as long as none of them has one. Pods that are being deleted, or
    whose machine is lost, soon have the PVC mounted no more.
    """
    workspace, cluster_nodes = observed.workspace, observed.cluster.nodes
    claim = claims.find_claim(workspace.claims, source.name)
    if store == "ephemeral" or claim is None or claims.is_shared(source, workspace.claims):
        return None
    serve_pods = tuple(pod for pod in workspace.sync_pods if is_serve_pod(pod))
    users = serve_pods if store else (*observed.gang.workers, *workspace.setup_pods)
    return tuple(
        pod.spec.node_name
        for pod in users
        if pod.spec.node_name and state_of(pod) is PodState.ACTIVE
        if nodes.find_loss(cluster_nodes, pod, now) is None
    )


def is_misplaced(pod: Pod, claim_nodes: tuple[str, ...] | None) -> bool:
    """Whether the pod runs, or has to run, on another machine than the pods that mount the PVC."""
    claim_nodes = claim_nodes or ()
    if pod.spec.node_name:
        return bool(claim_nodes) and alive(pod) and pod.spec.node_name not in claim_nodes
    node = pod.metadata.annotations.claim_node
    return bool(node) and node not in claim_nodes
