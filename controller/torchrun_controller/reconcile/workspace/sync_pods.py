"""The sync pods of a job: their results, which of them the job requests, and the next one."""

from collections.abc import Iterable
from datetime import datetime

from msgspec.structs import replace

from torchrun_api import names
from torchrun_api.kinds.core import Pod
from torchrun_api.kinds.job import TorchrunJob
from torchrun_controller.reconcile.model.observed import Defaults, Observed, ObservedWorkspace
from torchrun_controller.reconcile.model.plan import Apply, Delete
from torchrun_controller.reconcile.objects import workspace_source
from torchrun_controller.reconcile.objects.sync_pod import SyncRequest, serve_pod, sync_pod
from torchrun_controller.reconcile.pods.lifecycle import PodState, delete_pod, state_of
from torchrun_controller.reconcile.workspace import claims, delivery
from torchrun_controller.reconcile.workspace.delivery import find_claim_nodes
from torchrun_controller.reconcile.workspace.helper_pods import SyncMessage, container_end, own_end

KEPT_SYNC_PODS = 3


def read_result(pod: Pod) -> SyncMessage:
    """Return the result of a sync pod, or the reason of its failure."""
    return container_end(pod, names.SYNC_CONTAINER).message


def find_complete_pods(
    job: TorchrunJob, workspace: ObservedWorkspace, store: str | None = None
) -> list[Pod]:
    """Return sync pods that succeeded and pods that serve, with this kind of storage if given.

    What was written to a former PVC was deleted with it.
    """
    claim = claims.find_claim(workspace.claims, names.workspace_claim(job.metadata.name))
    return [
        pod
        for pod in workspace.sync_pods
        if store is None or pod.metadata.annotations.delivery == store
        if delivery.has_content(pod) and not claims.is_of_former_claim(pod, claim)
    ]


def find_current(job: TorchrunJob, workspace: ObservedWorkspace, store: str) -> Pod | None:
    """Return the last complete pod if its content is what the job requests."""
    pods = find_complete_pods(job, workspace, store)
    if not pods:
        return None
    latest = pods[-1]
    is_upload = latest.metadata.annotations.after_revision and not workspace_source.is_fetched(job)
    if is_upload and read_result(latest).sha256 == workspace_source.upload_digest(job):
        return latest
    return latest if is_current(job, latest) else None


def find_revision(job: TorchrunJob, workspace: ObservedWorkspace) -> int:
    """Return the newest revision of the workspace that is known to be complete; 0 for none."""
    revisions = (read_result(pod).revision for pod in find_complete_pods(job, workspace))
    newest = max(revisions, default=0) or job.status.workspace_revision
    announced_revision = job.metadata.annotations.get(names.WORKSPACE_REVISION, "")
    is_served = any(delivery.is_serve_pod(pod) for pod in workspace.sync_pods)
    return (
        newest + 1 if newest and not is_served and announced_revision == str(newest + 1) else newest
    )


def find_last_revision(job: TorchrunJob, workspace: ObservedWorkspace) -> int:
    """Return the newest revision that existed or was announced, perhaps on a former PVC.

    A new PVC goes on from it. Otherwise an announcement that outlived its PVC, as in a restored
    job, would name a revision that does not exist yet.
    """
    announced_revision = job.metadata.annotations.get(names.WORKSPACE_REVISION, "")
    return max(find_revision(job, workspace), names.number_in(announced_revision))


def find_commit(job: TorchrunJob, workspace: ObservedWorkspace, revision: int) -> str:
    """Return the commit of a revision; "" if no pod reports it."""
    results = (read_result(pod) for pod in reversed(find_complete_pods(job, workspace)))
    return next((result.commit for result in results if result.revision == revision), "")


def accepts_source(job: TorchrunJob, pod: Pod) -> bool:
    """Whether the pod accepts the present source of the job, perhaps among others.

    A pod without a digest accepts any upload with the token that it was created with.
    """
    annotations = pod.metadata.annotations
    by_token = not (annotations.workspace_sha256 or workspace_source.is_fetched(job))
    if by_token and annotations.upload_token_sha256 != workspace_source.upload_token(job):
        return False
    return is_current(job, pod) or is_standby(job, pod)


def is_standby(job: TorchrunJob, pod: Pod) -> bool:
    """Whether the pod accepts any upload with the present token of the job."""
    token = workspace_source.upload_token(job)
    annotations = pod.metadata.annotations
    return bool(annotations.after_revision and token) and annotations.upload_token_sha256 == token


def is_current(job: TorchrunJob, pod: Pod) -> bool:
    """Whether the pod was created for the present source of the job."""
    annotations = pod.metadata.annotations
    return (annotations.workspace_sha256, annotations.source) == (
        workspace_source.upload_digest(job),
        workspace_source.digest(job),
    )


def pinned_commit(job: TorchrunJob, latest: Pod | None) -> str:
    """Return the commit that a new pod must fetch, "" for any.

    The code changes between attempts only if a user requests it.
    """
    if job.status.workers is None or not workspace_source.is_fetched(job):
        return ""
    if latest is None:
        return job.status.workspace_commit
    if not is_current(job, latest):
        return ""
    if delivery.has_received(latest):
        # An eviction hides it in the result of the pod.
        commit = own_end(latest, names.SYNC_CONTAINER).message.commit
        return commit or job.status.workspace_commit
    return latest.metadata.annotations.commit


def build_pod(observed: Observed, request: SyncRequest, defaults: Defaults, now: datetime) -> Apply:
    """Build the requested pod. The revision, the machine and the PVC follow from `observed`."""
    job, queue, workspace = observed.job, observed.queue, observed.workspace
    source, store = request.source, request.store
    find = find_revision if request.stands_by else find_last_revision
    node = next(iter(find_claim_nodes(observed, source, store, now) or ()), "")
    request = replace(
        request,
        last_revision=find(job, workspace),
        with_workers=not (store or claims.is_shared(source, workspace.claims)),
        node=node,
        claim_uid="" if store == "ephemeral" else claims.find_uid(workspace.claims, source.name),
    )
    build = serve_pod if store else sync_pod
    return build(job, queue, request, defaults)


def delete_oldest_pods(job: TorchrunJob, workspace: ObservedWorkspace) -> tuple[Delete, ...]:
    """Delete sync pods to make room for one more; the last complete one stays."""
    complete = find_complete_pods(job, workspace)[-1:]
    oldest_pods = workspace.sync_pods[: -KEPT_SYNC_PODS + 1]
    return tuple(delete_pod(pod) for pod in oldest_pods if pod not in complete)


def end_preparations(workspace: ObservedWorkspace, *, serving: bool = True) -> tuple[Delete, ...]:
    """Delete running sync and setup pods; serve pods only if `serving`."""
    sync_pods = [p for p in workspace.sync_pods if serving or not delivery.is_serve_pod(p)]
    return end_pods((*sync_pods, *workspace.setup_pods))


def end_pods(pods: Iterable[Pod]) -> tuple[Delete, ...]:
    """Delete those of the pods that run and are not being deleted."""
    return tuple(delete_pod(p) for p in pods if state_of(p) is PodState.ACTIVE)
