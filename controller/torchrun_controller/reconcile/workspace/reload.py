"""Hot reload: newer code for a running gang, and a sync pod on standby for the next upload.

A sync pod that succeeded has created a revision of the workspace, and so has a serve pod that
serves. An annotation of the leader names the newest revision, and of every worker where a serve pod
has it. The launchers fetch what changed and restart the command on all nodes together, in the same
pods.
"""

from datetime import datetime

from torchrun_api import names
from torchrun_api.json import JsonObject, object_at
from torchrun_api.kinds.core import Pod
from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.meta import ConditionStatus
from torchrun_api.kinds.queue import TorchrunQueue
from torchrun_api.kinds.workspace import SYNCED_SOURCES
from torchrun_controller.reconcile.model.conditions import ConditionUpdate, Reason
from torchrun_controller.reconcile.model.messages import sentence
from torchrun_controller.reconcile.model.observed import (
    Defaults,
    Observed,
    ObservedGang,
    ObservedWorkspace,
)
from torchrun_controller.reconcile.objects import workspace_source
from torchrun_controller.reconcile.objects.sync_pod import Store, SyncRequest
from torchrun_controller.reconcile.pods.lifecycle import alive, follows_leader
from torchrun_controller.reconcile.spec.resolve import VolumeSource, resolve
from torchrun_controller.reconcile.workspace import claims, delivery, preparation
from torchrun_controller.reconcile.workspace.delivery import find_claim_nodes, is_misplaced
from torchrun_controller.reconcile.workspace.helper_pods import (
    SyncState,
    WorkspaceStep,
    next_number,
    next_retry,
)
from torchrun_controller.reconcile.workspace.sync_pods import (
    build_pod,
    delete_oldest_pods,
    end_pods,
    find_complete_pods,
    find_revision,
    is_standby,
    read_result,
)


def plan_reload(observed: Observed, now: datetime, defaults: Defaults) -> WorkspaceStep | None:
    """Return the next step towards newer code for a running gang; None if there is none."""
    source = _find_source(observed.job, observed.queue, observed.workspace)
    if source is None:
        return None
    step = preparation.prepare(observed, source, now, defaults)
    if step.state is not SyncState.READY:
        return step
    job, workspace = observed.job, observed.workspace
    serving_pods = _serving_pods(job, observed.gang, workspace)
    other_pods = [pod for pod in workspace.sync_pods if alive(pod) and pod not in serving_pods]
    if not workspace_source.stands_by(job) or claims.is_for_one_pod(source, workspace.claims):
        return WorkspaceStep(state=step.state, why=step.why, deletes=end_pods(other_pods))
    store = _store_of(workspace.sync_pods[-1])
    claim_nodes = find_claim_nodes(observed, source, store, now)
    standby_pods = [
        pod for pod in other_pods if is_standby(job, pod) and not is_misplaced(pod, claim_nodes)
    ]
    deletes = end_pods([pod for pod in other_pods if pod not in standby_pods])
    seconds = next_retry(workspace.sync_pods, names.SYNC_CONTAINER, now)
    if standby_pods or not find_revision(job, workspace) or seconds > 0:
        retry_after = seconds if seconds > 0 and not standby_pods else None
        return WorkspaceStep(
            state=step.state, why=step.why, deletes=deletes, requeue_after=retry_after
        )
    if claim_nodes == ():  # the pod follows a worker, and none has a machine
        return WorkspaceStep(state=step.state, why=step.why, deletes=deletes)
    number = next_number(workspace.sync_pods)
    request = SyncRequest(source=source, number=number, store=store, stands_by=True)
    pod = build_pod(observed, request, defaults, now)
    return WorkspaceStep(
        state=step.state,
        why=step.why,
        applies=(pod,),
        deletes=(*delete_oldest_pods(job, workspace), *deletes),
    )


def _find_source(
    job: TorchrunJob, queue: TorchrunQueue | None, workspace: ObservedWorkspace
) -> VolumeSource | None:
    """Return the PVC that newer code is written to, or the storage of a served workspace."""
    if workspace_source.source_of(job).source not in SYNCED_SOURCES:
        return None
    name = names.workspace_claim(job.metadata.name)
    claim = claims.find_claim(workspace.claims, name)
    if claim is not None and claim.metadata.terminating and not delivery.is_ephemeral(workspace):
        return None
    if delivery.is_served(job, workspace):
        source = resolve(job, queue).workspace if queue is not None else None
        return None if source is None or source.delivery == "shared" else source
    if claim is None:
        return None
    # The workers mount the PVC already, so there is no other route.
    return VolumeSource(name=name, mount_path="", delivery="shared")


def _serving_pods(job: TorchrunJob, gang: ObservedGang, workspace: ObservedWorkspace) -> list[Pod]:
    """Return the serve pods in use: the newest, and older ones until every worker has left them."""
    pods = find_complete_pods(job, workspace)
    serve_pods = [pod for pod in pods if delivery.is_serve_pod(pod)]
    if serve_pods and find_running_revision(job, gang) >= read_result(serve_pods[-1]).revision:
        return serve_pods[-1:]
    return serve_pods


def _store_of(pod: Pod) -> Store:
    if not delivery.is_serve_pod(pod):
        return ""
    return "claim" if pod.metadata.annotations.delivery == "claim" else "ephemeral"


def check_up_to_date(
    job: TorchrunJob, gang: ObservedGang, workspace: ObservedWorkspace, step: WorkspaceStep
) -> ConditionUpdate | None:
    """Return the condition UpToDate if the workers run older code than the job requests.

    None while the update takes only a moment.
    """
    revision, is_fetched = find_running_revision(job, gang), workspace_source.is_fetched(job)
    if step.state is not SyncState.READY:
        if not (step.failed or is_fetched):
            return None
        message = f"{sentence(step.why.message)} The pods continue with revision {revision}."
        return _not_up_to_date("False" if step.failed else "Unknown", step.why.reason, message)
    newest = find_revision(job, workspace)
    if newest <= revision:
        return None
    if not all(alive(pod) for pod in gang.workers):
        message = f"Revision {newest} waits for the next gang, because a pod of this one has ended."
        return _not_up_to_date("Unknown", "WorkersEnded", message)
    if not is_fetched:
        return None
    return _not_up_to_date("Unknown", "Reloading", f"The pods are reloading revision {newest}.")


def _not_up_to_date(status: ConditionStatus, reason: str, message: str) -> ConditionUpdate:
    return ConditionUpdate(names.UP_TO_DATE, status, Reason(reason, message))


def build_annotations(job: TorchrunJob, workspace: ObservedWorkspace) -> JsonObject:
    """Return the annotations of workers: their revision, its URL, and whether edits may follow."""
    annotations: JsonObject = {}
    revision = find_revision(job, workspace)
    pods = find_complete_pods(job, workspace)
    serve_pods = [pod for pod in pods if delivery.is_serve_pod(pod)]
    if serve_pods and delivery.is_serving(serve_pods[-1]):
        manifest = read_result(serve_pods[-1]).manifest
        annotations[names.SERVED] = f"{delivery.serve_url(serve_pods[-1])} {manifest}"
    if revision and (bool(serve_pods) is (names.SERVED in annotations)):
        annotations[names.REVISION] = str(revision)
    if job.spec.development:
        annotations[names.DEVELOPMENT] = "true"
    return annotations


def annotate_template(
    template: JsonObject, job: TorchrunJob, workspace: ObservedWorkspace
) -> JsonObject:
    """Return the pod template with these annotations."""
    metadata = object_at(template, "metadata")
    new_annotations = build_annotations(job, workspace)
    if not new_annotations:
        return template
    annotations = object_at(metadata, "annotations") | new_annotations
    return {**template, "metadata": metadata | {"annotations": annotations}}


def find_running_revision(job: TorchrunJob, gang: ObservedGang) -> int:
    """Return the lowest revision that a worker of the gang is annotated with.

    Workers that follow their leader have the annotation of served code only.
    """
    revisions = [
        pod.metadata.annotations.revision
        for pod in gang.workers
        if not follows_leader(pod) or pod.metadata.annotations.served
    ]
    recorded_revision = job.status.workspace_revision
    if not gang.child_jobs or not revisions:
        return recorded_revision
    return min(names.number_in(revision, recorded_revision) for revision in revisions)
