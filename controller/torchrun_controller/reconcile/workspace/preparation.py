"""The workspace of a job: its PVC, and the sync pod that fills it."""

from datetime import datetime, timedelta
from typing import ClassVar

import msgspec
from msgspec.structs import replace

from torchrun_api import names
from torchrun_api.kinds.core import Pod
from torchrun_api.kinds.job import TorchrunJob
from torchrun_controller.reconcile.model.conditions import Reason, find_condition
from torchrun_controller.reconcile.model.messages import sentence
from torchrun_controller.reconcile.model.observed import (
    Defaults,
    Observed,
    ObservedCluster,
    ObservedWorkspace,
)
from torchrun_controller.reconcile.model.plan import Apply
from torchrun_controller.reconcile.model.times import seconds_left
from torchrun_controller.reconcile.objects import workspace_source
from torchrun_controller.reconcile.objects.sync_pod import SyncRequest
from torchrun_controller.reconcile.objects.volumes import claim
from torchrun_controller.reconcile.pods import nodes, waiting
from torchrun_controller.reconcile.pods.lifecycle import delete_pod
from torchrun_controller.reconcile.pods.nodes import NodeLoss
from torchrun_controller.reconcile.spec.resolve import ResolvedSpec, VolumeSource, WorkspaceDownload
from torchrun_controller.reconcile.workspace import delivery
from torchrun_controller.reconcile.workspace.claims import (
    check_terminating,
    find_claim,
    release_terminating,
    usable_base,
)
from torchrun_controller.reconcile.workspace.delivery import (
    Route,
    choose_route,
    find_claim_nodes,
    is_misplaced,
)
from torchrun_controller.reconcile.workspace.helper_pods import (
    PodFailure,
    SyncMessage,
    SyncState,
    WorkspaceStep,
    create_replacement,
    next_number,
    next_step,
    refused_step,
    waiting_step,
)
from torchrun_controller.reconcile.workspace.sync_pods import (
    accepts_source,
    build_pod,
    delete_oldest_pods,
    end_pods,
    find_complete_pods,
    find_current,
    pinned_commit,
    read_result,
)

BASE_TIMEOUT = timedelta(seconds=20)  # for a pod that mounts a base to start
# From the creation of a sync pod for newer code until a gang that restarts uses the previous code.
UPDATE_TIMEOUT = timedelta(seconds=30)
NO_WORKSPACE = Reason("NoWorkspace", "The code is in the image.")
SYNCED = Reason("Synced", "The workspace is in its PVC.")


def prepare(
    observed: Observed, source: VolumeSource | None, now: datetime, defaults: Defaults
) -> WorkspaceStep:
    """Decide the next step towards a ready workspace."""
    no_pod_reason = _why_no_pod(source)
    if no_pod_reason is not None:
        return WorkspaceStep(state=SyncState.READY, why=no_pod_reason)
    assert source is not None, "nothing is to be prepared"
    job, workspace = observed.job, observed.workspace
    route = choose_route(job, workspace, observed.cluster, source, now)
    why = check_terminating(workspace.claims, source.name)
    if why is not None and route.store != "ephemeral":
        return replace(waiting_step(why), deletes=release_terminating(workspace, source.name))
    pods = SyncPods(observed, source, route, defaults, now)
    return next_step(pods, observed.cluster.nodes, now)


class SyncPods(msgspec.Struct, frozen=True):
    """Sync pods as helper pods; a serve pod is one that goes on to serve what it received."""

    observed: Observed
    source: VolumeSource
    route: Route
    defaults: Defaults
    now: datetime

    container: ClassVar[str] = names.SYNC_CONTAINER

    @property
    def pods(self) -> tuple[Pod, ...]:
        """The sync pods of the job."""
        return self.observed.workspace.sync_pods

    @property
    def lacks_claim(self) -> bool:
        """Whether the PVC does not exist: pods of a former one would mount the next one, too."""
        present = find_claim(self.observed.workspace.claims, self.source.name)
        return present is None and self.route.store != "ephemeral"

    def result(self) -> WorkspaceStep | None:
        """The workspace that a pod made from the present source, where it is reachable now."""
        job, workspace = self.observed.job, self.observed.workspace
        pod = find_current(job, workspace, self.route.store)
        if (
            pod is None
            or self.lacks_claim
            or not _is_available(self.observed.cluster, pod, self.now)
        ):
            return None
        return _ready(job, pod, self.route)

    def create_pod(self, number: int) -> WorkspaceStep:
        """Create one more sync pod, with its PVC if that does not exist; the last few pods stay."""
        job, source, workspace = self.observed.job, self.source, self.observed.workspace
        oldest_pods = delete_oldest_pods(job, workspace)
        if not self.lacks_claim:
            return WorkspaceStep(
                state=SyncState.SYNCING,
                why=Reason("SyncPodStarting", "Creating a sync pod."),
                applies=(self._build_pod(number),),
                deletes=oldest_pods,
            )
        pod = self._build_pod(number, usable_base(workspace))
        return WorkspaceStep(
            state=SyncState.SYNCING,
            why=Reason("SyncPodStarting", f"Creating PVC {source.name} and a sync pod."),
            applies=(claim(job, source, names.WORKSPACE, pod.name), pod),
            deletes=(*oldest_pods, *end_pods(workspace.setup_pods)),
        )

    def _build_pod(self, number: int, base: str = "") -> Apply:
        """Build the sync pod, or the serve pod if the route has one."""
        observed, store = self.observed, self.route.store
        request = SyncRequest(
            source=self.source,
            number=number,
            store=store,
            commit=pinned_commit(observed.job, observed.workspace.latest_sync_pod),
            base="" if store else base,
        )
        return build_pod(observed, request, self.defaults, self.now)

    def replace_pod(self, pod: Pod) -> WorkspaceStep:
        """Delete a pod of another source, route or PVC.

        A serve pod continues until the next one serves: the upload may never arrive.
        """
        if self.route.store and delivery.has_content(pod):
            return self.create_pod(next_number(self.pods))
        return self._delete_pod(pod, self._why_replaced(pod))

    def _why_replaced(self, pod: Pod) -> Reason:
        why = Reason("Replacing", "The workspace source has changed. Replacing the sync pod.")
        store = self.route.store
        if pod.metadata.annotations.delivery != store and store:
            message = f"{sentence(self.route.why)} A pod will serve the workspace."
            why = Reason(delivery.DIRECT_DELIVERY, message)
        elif pod.metadata.annotations.delivery != store:
            why = Reason("Replacing", "The workspace now uses a PVC. Replacing the sync pod.")
        elif self.lacks_claim:
            message = f"PVC {self.source.name} was deleted. Replacing the sync pod."
            why = Reason("Replacing", message)
        elif self._is_misplaced(pod):
            message = (
                f"Pod {pod.metadata.name} is assigned to a machine where no other pod mounts"
                f" PVC {self.source.name}. Replacing it."
            )
            why = Reason("Replacing", message)
        return why

    def _delete_pod(self, pod: Pod, why: Reason) -> WorkspaceStep:
        return WorkspaceStep(
            state=SyncState.SYNCING,
            why=why,
            deletes=(delete_pod(pod),),
            # Once the pod is gone, only the status records that the job no longer waits for a PVC.
            status_before_deletes=self.route.store == "ephemeral",
        )

    def replace_lost_pod(self, pod: Pod, loss: NodeLoss) -> WorkspaceStep:
        """Replace the pod at once: a sync pod tolerates another one that runs on a lost machine."""
        why = Reason("SyncPodLost", f"{loss.message} Replacing the pod.")
        return create_replacement(self, pod, why)

    def follow_pod(self, pod: Pod) -> WorkspaceStep:
        """Wait for the pod, or report why the container that fills the workspace failed."""
        message = read_result(pod)
        if message.reason:
            return self._after_container_failure(pod, message)
        base_seconds = (
            _base_seconds_left(pod, self.now) if pod.status.phase in ("", "Pending") else None
        )
        if base_seconds is not None and base_seconds <= 0:
            # The next pod has no base: only the pod that is created with its PVC has one.
            late = (
                f"Pod {pod.metadata.name} has not started with the PVC of job"
                f" {pod.metadata.annotations.workspace_base} within {BASE_TIMEOUT.seconds} s."
                " Replacing it by a pod without that PVC."
            )
            return self._delete_pod(pod, Reason("Replacing", late))
        step = waiting_step(self._why_syncing(pod))
        if base_seconds is not None:
            return replace(step, requeue_after=base_seconds)
        late_after = seconds_left(UPDATE_TIMEOUT, pod.metadata.creation_timestamp, self.now)
        step = replace(step, late_after=late_after)
        return replace(self._lost_upload(pod) or step, requeue_after=self.route.binding_seconds)

    def _after_container_failure(self, pod: Pod, message: SyncMessage) -> WorkspaceStep:
        """The kubelet restarts the container of a serve pod, so the pod itself does not fail."""
        failure = self.failure(pod, message)
        if failure.remedy:
            return refused_step(failure)
        why = Reason(failure.reason, f"{sentence(failure.message)} Retrying.")
        return replace(waiting_step(why), failed=True)

    def why_terminating(self, pod: Pod) -> Reason:
        """A pod whose delivery has changed terminates for that."""
        reason = (
            delivery.DIRECT_DELIVERY
            if delivery.is_recorded_direct(self.observed.job)
            else "Replacing"
        )
        return Reason(reason, f"Waiting for pod {pod.metadata.name} to be deleted.")

    def is_current(self, pod: Pod) -> bool:
        """Whether the pod takes the present source, and can keep it where the route says."""
        same_store = pod.metadata.annotations.delivery == self.route.store and not self.lacks_claim
        if not same_store or self._is_misplaced(pod):
            return False
        return accepts_source(self.observed.job, pod)

    def _is_misplaced(self, pod: Pod) -> bool:
        store = self.route.store
        claim_nodes = find_claim_nodes(self.observed, self.source, store, self.now)
        return is_misplaced(pod, claim_nodes)

    def is_edited(self, pod: Pod) -> bool:
        """An edit of the source makes the pod outdated; no other edit can fix its failure."""
        return False

    def failure(self, pod: Pod, message: SyncMessage) -> PodFailure:
        """The failure of a fetch or an upload; the sync program knows which are permanent."""
        job = self.observed.job
        remedy = f"Fix it, then run: kubectl torchrun sync {job.metadata.name}"
        if workspace_source.is_fetched(job) and job.status.workers is None:
            remedy = (
                "Change spec.volumes.workspace, or fix the source and run: kubectl torchrun sync"
                f" {job.metadata.name}"
            )
        return PodFailure(
            message.reason or "SyncFailed",
            message.message or "The sync pod failed.",
            remedy if message.permanent else "",
        )

    def _lost_upload(self, pod: Pod) -> WorkspaceStep | None:
        """The step if the only copy of an upload was lost with the former pod.

        Only the user has another copy.
        """
        job, revision = self.observed.job, self.observed.job.status.workspace_revision
        if pod.metadata.annotations.delivery != "ephemeral" or workspace_source.is_fetched(job):
            return None
        if not revision or find_complete_pods(job, self.observed.workspace):
            return None
        if pod.status.phase != "Running" or delivery.has_content(pod):
            return None
        why = Reason(
            "WorkspaceLost",
            f"Revision {revision} of the workspace was lost with the pod that stored it. Upload it"
            f" to pod {pod.metadata.name} again: kubectl torchrun sync {job.metadata.name}",
        )
        return replace(waiting_step(why), failed=True)

    def _why_syncing(self, pod: Pod) -> Reason:
        """Return what the pod does, or what it waits for."""
        job, name = self.observed.job, pod.metadata.name
        if delivery.is_serve_pod(pod) and delivery.has_content(pod):
            return Reason("SyncPodStarting", f"Waiting for pod {name} to serve the workspace.")
        if pod.status.phase == "Running" and workspace_source.is_fetched(job):
            source = workspace_source.describe_source(job)
            return Reason("Fetching", f"Pod {name} is fetching {source}.")
        if pod.status.phase == "Running" and delivery.accepts_upload(pod):
            return Reason(
                "WaitingForUpload",
                f"Pod {name} is waiting for the upload. If no upload is running, run: kubectl"
                f" torchrun sync {job.metadata.name}",
            )
        claim_name = names.workspace_claim(job.metadata.name)
        workspace_claim = find_claim(self.observed.workspace.claims, claim_name)
        is_ephemeral = pod.metadata.annotations.delivery == "ephemeral"
        mounted_claims = (workspace_claim,) if workspace_claim and not is_ephemeral else ()
        why = waiting.pod_reason(pod, mounted_claims, self.observed.cluster.warnings)
        # The scheduler's condition on a PVC stays until its next attempt, even if it is bound now.
        is_bound = workspace_claim is not None and workspace_claim.status.phase == "Bound"
        if why is None or (why.reason == "ClaimPending" and is_bound):
            return Reason("SyncPodStarting", f"Pod {name} is starting.")
        return Reason(why.reason, f"Pod {name}: {why.message}")


def _is_available(cluster: ObservedCluster, pod: Pod, now: datetime) -> bool:
    """Whether workers can get the result of the pod: from the PVC, or from the pod itself."""
    if not delivery.is_serve_pod(pod):
        return True
    return delivery.is_serving(pod) and nodes.find_loss(cluster.nodes, pod, now) is None


def prepare_next_gang(
    observed: Observed, source: VolumeSource | None, now: datetime, defaults: Defaults
) -> WorkspaceStep:
    """Decide the next step, or return the workspace of the last gang: newer code failed or is late.

    A hot reload brings the newer code when it is complete. An upload may have been interrupted.
    """
    step = prepare(observed, source, now, defaults)
    late_after = 0.0 if step.failed else step.late_after
    if source is None or late_after is None:
        return step
    last_step = _last_workspace(observed, source, now)
    if last_step is None:
        return step
    if late_after <= 0:
        return last_step
    return replace(step, requeue_after=min(step.requeue_after or late_after, late_after))


def _last_workspace(
    observed: Observed, source: VolumeSource, now: datetime
) -> WorkspaceStep | None:
    job, workspace, cluster = observed.job, observed.workspace, observed.cluster
    if job.status.workers is None:
        return None
    route = choose_route(job, workspace, cluster, source, now)
    pods = find_complete_pods(job, workspace, route.store)
    if not pods or not _is_available(cluster, pods[-1], now):
        return None
    return _ready(job, pods[-1], route)


def _base_seconds_left(pod: Pod, now: datetime) -> float | None:
    """Return the seconds that a pod with a base has to start; None for a pod without one."""
    creation_time = pod.metadata.creation_timestamp
    if not pod.metadata.annotations.workspace_base or creation_time is None:
        return None
    return seconds_left(BASE_TIMEOUT, creation_time, now)


def _ready(job: TorchrunJob, pod: Pod, route: Route) -> WorkspaceStep:
    result = read_result(pod)
    # Not the commit if possible: two directories of a repository share it.
    content = (
        result.sha256
        or pod.metadata.annotations.workspace_sha256
        or result.commit
        or job.status.workspace_commit
    )
    step = WorkspaceStep(state=SyncState.READY, why=SYNCED, commit=result.commit, content=content)
    if not route.store:
        return step
    download = WorkspaceDownload(url=delivery.serve_url(pod), manifest=result.manifest)
    return replace(step, why=delivery.describe_delivery(pod, route.why), served=download)


def _why_no_pod(source: VolumeSource | None) -> Reason | None:
    """Return why the job needs no sync pod; None if it needs one."""
    if source is None:
        return NO_WORKSPACE
    if source.existing:
        return Reason("Existing", f"PVC {source.name} is mounted read-only.")
    return None


def describe_workspace(
    job: TorchrunJob, workspace: ObservedWorkspace, spec: ResolvedSpec | None
) -> Reason | None:
    """Return the reason of WorkspaceReady for a present gang; None if it is unknown.

    `spec` is given if no status records the gang: it shows whether a sync pod was needed.
    """
    latest = workspace.latest_sync_pod
    if latest is None:
        return None if spec is None else _why_no_pod(spec.workspace)
    if not delivery.is_serve_pod(latest):
        return SYNCED
    condition = find_condition(job.status.conditions, "WorkspaceReady")
    if condition is None or condition.status != "True":
        return delivery.describe_unrecorded_delivery(latest)
    return Reason(condition.reason, condition.message)
