"""How a workspace reaches the workers: from a claim that they share, or from a pod that serves it.

A serve pod is a sync pod that stays: it takes the upload in the same way, and serves what it made.
It keeps the workspace on the claim where only it has to mount that, else on storage of its own.
"""

from datetime import datetime, timedelta

import msgspec

from torchrun_api import names
from torchrun_api.core import ContainerStatus, PersistentVolumeClaim, Pod
from torchrun_controller.reconcile.model.conditions import Reason, find_condition
from torchrun_controller.reconcile.model.observed import Observed
from torchrun_controller.reconcile.objects.serve_pod import Store
from torchrun_controller.reconcile.pods import waiting
from torchrun_controller.reconcile.pods.lifecycle import alive
from torchrun_controller.reconcile.spec.resolve import VolumeSource

# For a claim that a pod waits for. A class that takes longer to bind wants delivery: shared.
PATIENCE = timedelta(seconds=30)
REASON = "DirectDelivery"


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """The way to go. `store` is where a serve pod keeps the workspace, "" for a shared claim.

    `why` says why there is no shared claim. `left` are the seconds for which the claim may still be
    waited for.
    """

    store: Store
    why: str = ""
    left: float | None = None


def route(
    observed: Observed, wanted: VolumeSource, held: PersistentVolumeClaim | None, now: datetime
) -> Route:
    """Decide the way from the claim as it is, and from the pod that is under way.

    A pod with storage of its own holds the only copy, so that a claim that binds late changes
    nothing.
    """
    asked = wanted.delivery == "direct"
    if wanted.delivery == "shared":
        return Route(store="")
    given = "delivery is direct"
    latest = observed.workspace.sync_pods[-1] if observed.workspace.sync_pods else None
    pending = held is not None and held.status.phase == "Pending"
    if needs_no_claim(observed) or (
        pending and not (latest and alive(latest)) and decided(observed)
    ):
        why = given if asked else f"claim {wanted.name} was not bound"
        return Route(store="ephemeral", why=why)
    failure, left = _never_bound(observed, held, now)
    if failure:
        return Route(store="ephemeral", why=failure)
    return Route(store="claim" if asked else "", why=given if asked else "", left=left)


def needs_no_claim(observed: Observed) -> bool:
    """Whether the last pod keeps the workspace on storage of its own."""
    return any(
        p.metadata.annotations.delivery == "ephemeral" for p in observed.workspace.sync_pods[-1:]
    )


def decided(observed: Observed) -> bool:
    """Whether the status says that the workspace is served, where no pod is there to show it."""
    ready = find_condition(observed.job.status.conditions, "WorkspaceReady")
    return ready is not None and ready.reason == REASON


def is_served(observed: Observed) -> bool:
    """Whether a gang that exists takes its workspace from a serve pod, in use or lost.

    The pod shows it where no status does: the gang may be older than any status.
    """
    return decided(observed) or any(serves(pod) for pod in observed.workspace.sync_pods[-1:])


def _never_bound(
    observed: Observed, held: PersistentVolumeClaim | None, now: datetime
) -> tuple[str, float | None]:
    """Why the claim is given up, or the seconds until it is; a pod must be waiting for it."""
    if held is None or held.status.phase != "Pending" or not observed.workspace.sync_pods:
        return "", None
    failed = waiting.binding_failure(held, observed.cluster.warnings)
    if failed is not None:
        return failed.message, None
    pod = observed.workspace.sync_pods[-1]
    since = pod.metadata.creation_timestamp
    why = waiting.pod_reason(pod, (held,), observed.cluster.warnings)
    if not alive(pod) or since is None or (why is not None and why.reason != "ClaimPending"):
        return "", None
    left = (since + PATIENCE - now).total_seconds()
    if left > 0:
        return "", left
    return f"claim {held.metadata.name} was not bound within {PATIENCE.seconds} s", None


def serves(pod: Pod) -> bool:
    """Whether this is a serve pod."""
    return bool(pod.metadata.annotations.delivery)


def is_serving(pod: Pod) -> bool:
    """Whether a serve pod has the workspace whole, and hands it out."""
    ready = _container(pod, names.SERVE_CONTAINER).ready
    # Not the pod's own Ready: with a container that has ended it never is.
    return has_content(pod) and ready and bool(pod.status.pod_ip)


def takes_upload(pod: Pod) -> bool:
    """Whether the pod listens for an upload; a pod that runs may not listen yet."""
    return _container(pod, names.SYNC_CONTAINER).ready


def has_content(pod: Pod) -> bool:
    """Whether the workspace of a pod is whole, and there as long as its storage is."""
    if not serves(pod):
        return pod.status.phase == "Succeeded"
    ended = _container(pod, names.SYNC_CONTAINER).state.terminated
    gone = pod.metadata.terminating or not alive(pod)
    return ended is not None and ended.exit_code == 0 and not gone


def node(observed: Observed) -> str:
    """Where the claim is mounted that serve pods share, "" where that binds nobody."""
    pods = (p for p in observed.workspace.sync_pods if serves(p) and alive(p) and p.spec.node_name)
    known = observed.cluster.nodes
    placed = (p.spec.node_name for p in pods)
    return next((name for name in placed if known is None or name in known), "")


def _container(pod: Pod, name: str) -> ContainerStatus:
    found = (status for status in pod.status.container_statuses if status.name == name)
    return next(found, ContainerStatus())


def url(pod: Pod) -> str:
    """Where workers fetch the workspace."""
    address = pod.status.pod_ip
    host = f"[{address}]" if ":" in address else address
    return f"http://{host}:{names.SERVE_PORT}"


def delivered(pod: Pod, way: str) -> Reason:
    """Of a workspace that is ready on its serve pod."""
    name = pod.metadata.labels.torchrun_job
    return Reason(REASON, f"{way}; workers fetch the workspace from a pod {names.serve_pod(name)}")


def delivered_unrecorded(pod: Pod) -> Reason | None:
    """The same where no status tells of it; None where the pod no longer has the workspace."""
    if not has_content(pod):
        return None
    on_claim = pod.metadata.annotations.delivery == "claim"
    return delivered(pod, "delivery is direct" if on_claim else "no claim was bound")


def mounted_claims(observed: Observed) -> tuple[PersistentVolumeClaim, ...]:
    """The claims that the workers mount; that of a workspace which is served is not among them."""
    if not observed.workspace.sync_pods or not serves(observed.workspace.sync_pods[-1]):
        return observed.workspace.claims
    served = names.workspace_claim(observed.job.metadata.name)
    return tuple(claim for claim in observed.workspace.claims if claim.metadata.name != served)
