"""The workspace: its claim, the sync pod that fills it, and how far that is."""

from datetime import datetime, timedelta
from typing import ClassVar

import msgspec
from msgspec.structs import replace

from torchrun_api import names
from torchrun_api.core import Pod
from torchrun_api.job import TorchrunJob
from torchrun_controller.reconcile.model.conditions import Reason, find_condition
from torchrun_controller.reconcile.model.observed import Defaults, Observed
from torchrun_controller.reconcile.model.plan import Apply, Delete
from torchrun_controller.reconcile.model.times import seconds_left
from torchrun_controller.reconcile.objects import workspace_source
from torchrun_controller.reconcile.objects.serve_pod import serve_pod
from torchrun_controller.reconcile.objects.sync_pod import sync_pod
from torchrun_controller.reconcile.objects.volumes import claim
from torchrun_controller.reconcile.pods import nodes, waiting
from torchrun_controller.reconcile.pods.lifecycle import alive, delete_pod
from torchrun_controller.reconcile.spec.resolve import ResolvedSpec, Served, VolumeSource
from torchrun_controller.reconcile.workspace import delivery, retry, sync_results
from torchrun_controller.reconcile.workspace.claims import named, terminating
from torchrun_controller.reconcile.workspace.delivery import Route, route
from torchrun_controller.reconcile.workspace.helper_pods import (
    PodFailure,
    SyncState,
    Workspace,
    next_number,
    next_step,
    refused,
    syncing,
)
from torchrun_controller.reconcile.workspace.retry import SyncMessage, end_of

BASE_WAIT = timedelta(seconds=20)
KEPT_SYNC_PODS = 3
NO_WORKSPACE = Reason("NoWorkspace", "the code is in the image")
SYNCED = Reason("Synced", "the workspace is in its claim")


def prepare(
    observed: Observed, source: VolumeSource | None, now: datetime, defaults: Defaults
) -> Workspace:
    """Decide the next step towards a ready workspace."""
    given = _given(source)
    if given is not None:
        return Workspace(state=SyncState.READY, why=given)
    assert source is not None, "nothing is to be prepared"
    present = named(observed.workspace.claims, source.name)
    way = route(observed, source, present, now)
    ending = terminating(observed.workspace.claims, source.name)
    if ending is not None and way.store != "ephemeral":
        # A pod that mounts the PVC would keep it from being deleted.
        return replace(syncing(ending), deletes=end_preparations(observed))
    pods = observed.workspace.sync_pods
    if present is None and way.store != "ephemeral":
        pod = _pod(observed, source, way, next_number(pods), defaults, _base(observed))
        return Workspace(
            state=SyncState.SYNCING,
            why=Reason("Creating", f"claim {source.name} and a sync pod are being made"),
            applies=(claim(observed.job, source, names.WORKSPACE), pod),
        )
    return next_step(SyncPods(observed, source, way, defaults, now), now)


class SyncPods(msgspec.Struct, frozen=True):
    """Sync pods as helper pods; a serve pod is one that goes on to serve what it received."""

    observed: Observed
    source: VolumeSource
    way: Route
    defaults: Defaults
    now: datetime

    container: ClassVar[str] = names.SYNC_CONTAINER

    @property
    def pods(self) -> tuple[Pod, ...]:
        """The sync pods of the job."""
        return self.observed.workspace.sync_pods

    def result(self) -> Workspace | None:
        """The workspace that a pod made from the present source, where it is reachable now."""
        pod = sync_results.newest(self.observed, self.way.store)
        if pod is None or not _is_at_hand(self.observed, pod, self.now):
            return None
        return _ready(self.observed.job, pod, self.way)

    def create_pod(self, number: int) -> Workspace:
        """One more sync pod; only the last few are kept."""
        return Workspace(
            state=SyncState.SYNCING,
            why=Reason("Creating", "a sync pod is being made"),
            applies=(_pod(self.observed, self.source, self.way, number, self.defaults),),
            deletes=stale(self.observed),
        )

    def replace_pod(self, pod: Pod) -> Workspace:
        """Delete a pod of another source or route. One that serves goes on beside the next one.

        The upload that the job asks for may never arrive.
        """
        if self.way.store and delivery.has_content(pod):
            return self.create_pod(next_number(self.pods))
        return self._delete_pod(pod)

    def _delete_pod(self, pod: Pod) -> Workspace:
        why = Reason("Replacing", "the job names another source; the sync pod is being replaced")
        store = self.way.store
        if pod.metadata.annotations.delivery != store and store:
            why = Reason(delivery.REASON, f"{self.way.why}; a pod will serve the workspace")
        elif pod.metadata.annotations.delivery != store:
            why = Reason("Replacing", "a claim is used now")
        return Workspace(
            state=SyncState.SYNCING,
            why=why,
            deletes=(delete_pod(pod),),
            # Once the pod is gone, only the status records that the job no longer waits for a PVC.
            status_before_deletes=store == "ephemeral",
        )

    def replace_lost_pod(self, pod: Pod) -> Workspace | None:
        """Another pod takes the place of one whose node does not report."""
        loss = nodes.find_loss(self.observed.cluster.nodes, pod, self.now) if alive(pod) else None
        if loss is None:
            return None
        step = self.create_pod(next_number(self.pods))
        name, uid = pod.metadata.name, pod.metadata.uid
        own = () if pod.metadata.terminating else (delete_pod(pod),)
        return replace(
            step,
            why=Reason("SyncPodLost", f"{loss.message}; another pod takes the place of {name}"),
            deletes=(*(d for d in step.deletes if d.uid != uid), *own),
        )

    def follow_pod(self, pod: Pod) -> Workspace:
        """Wait for the pod, or report why the container that fills the workspace failed."""
        message = sync_results.verdict(pod)
        if message.reason:
            return self._after_container_failure(pod, message)
        left = _base_left(pod, self.now) if pod.status.phase in ("", "Pending") else None
        if left is not None and left <= 0:
            # The next pod has no base: only the pod that is created with its PVC has one.
            return self._delete_pod(pod)
        step = syncing(_why_syncing(self.observed, pod))
        if left is not None:
            return replace(step, requeue_after=left)
        return replace(_lost_before(self.observed, pod) or step, requeue_after=self.way.left)

    def _after_container_failure(self, pod: Pod, message: SyncMessage) -> Workspace:
        """The kubelet restarts the container of a serve pod, so the pod itself does not fail."""
        failure = self.failure(pod, message)
        if failure.remedy:
            return refused(failure)
        why = Reason(failure.reason, f"{failure.message}; it is tried again")
        return replace(syncing(why), failed=True)

    def why_terminating(self, pod: Pod) -> Reason:
        """A pod whose delivery has changed terminates for that."""
        reason = delivery.REASON if delivery.decided(self.observed) else "SyncPodEnding"
        return Reason(reason, f"pod {pod.metadata.name} is being deleted")

    def is_current(self, pod: Pod) -> bool:
        """Whether the pod takes the present source, and keeps it where the route says."""
        same_store = pod.metadata.annotations.delivery == self.way.store
        return same_store and sync_results.takes(self.observed.job, pod)

    def is_edited(self, pod: Pod) -> bool:
        """An edit of the source makes the pod outdated; no other edit can fix its failure."""
        return False

    def failure(self, pod: Pod, message: SyncMessage) -> PodFailure:
        """The failure of a fetch or an upload; the sync program knows which are permanent."""
        job = self.observed.job
        remedy = f"mend it, then run: kubectl torchrun sync {job.metadata.name}"
        if workspace_source.is_fetched(job) and job.status.workers is None:
            remedy = f"change spec.volumes.workspace, or {remedy}"
        return PodFailure(
            message.reason or "SyncFailed",
            message.message or "the sync pod failed",
            remedy if message.permanent else "",
        )


def _is_at_hand(observed: Observed, pod: Pod, now: datetime) -> bool:
    """Whether what the pod made can be had now: from the claim, or from itself."""
    if not delivery.serves(pod):
        return True
    return delivery.is_serving(pod) and nodes.find_loss(observed.cluster.nodes, pod, now) is None


def last_good(observed: Observed, wanted: VolumeSource, now: datetime) -> Workspace | None:
    """What the gang before ran with, for the next one where newer code did not come."""
    held = named(observed.workspace.claims, wanted.name)
    way = route(observed, wanted, held, now)
    done = sync_results.done(observed, way.store) if observed.job.status.workers is not None else []
    if not done or not _is_at_hand(observed, done[-1], now):
        return None
    return _ready(observed.job, done[-1], way)


def _base(observed: Observed) -> str:
    """The job whose workspace the first sync pod can mount beside its own; "" for none.

    It may go with what else mounts it, or has it for itself.
    """
    base = observed.workspace.base
    if base is None or base.claim.status.phase != "Bound":
        return ""
    if base.claim.metadata.terminating or base.claim.metadata.labels.component != (names.WORKSPACE):
        return ""
    shared = {"ReadWriteMany", "ReadOnlyMany"} & {*base.claim.spec.access_modes}
    return "" if base.in_use and not shared else base.claim.metadata.labels.torchrun_job


def _base_left(pod: Pod, now: datetime) -> float | None:
    """Seconds that a pod with a base has to start; None where it has none."""
    created = pod.metadata.creation_timestamp
    if not pod.metadata.annotations.workspace_base or created is None:
        return None
    return seconds_left(BASE_WAIT, created, now)


def _ready(job: TorchrunJob, pod: Pod, way: Route) -> Workspace:
    said = sync_results.verdict(pod)
    content = (
        workspace_source.upload_digest(job)
        or said.commit
        or job.status.workspace_commit
        or said.sha256
    )
    ready = Workspace(state=SyncState.READY, why=SYNCED, commit=said.commit, content=content)
    if not way.store:
        return ready
    served = Served(url=delivery.url(pod), manifest=said.manifest)
    return replace(ready, why=delivery.delivered(pod, way.why), served=served)


def _given(wanted: VolumeSource | None) -> Reason | None:
    """Why there is nothing to prepare, where that is so."""
    if wanted is None:
        return NO_WORKSPACE
    if wanted.existing:
        return Reason("Existing", f"claim {wanted.name} is mounted as it is, read-only")
    return None


def said(observed: Observed, run: ResolvedSpec | None) -> Reason | None:
    """How the workspace of a gang that is there came to be, where its sync pod is there still.

    `run` is known of a gang that no status tells of: what needs no pod is said by it.
    """
    if not observed.workspace.sync_pods:
        return None if run is None else _given(run.workspace)
    latest = observed.workspace.sync_pods[-1]
    if not delivery.serves(latest):
        return SYNCED
    known = find_condition(observed.job.status.conditions, "WorkspaceReady")
    if known is None or known.status != "True":
        return delivery.delivered_unrecorded(latest)
    return Reason(known.reason, known.message)


def _pod(
    observed: Observed,
    wanted: VolumeSource,
    way: Route,
    number: int,
    defaults: Defaults,
    base: str = "",
) -> Apply:
    latest = observed.workspace.sync_pods[-1] if observed.workspace.sync_pods else None
    commit = sync_results.pinned(observed.job, latest)
    if not way.store:
        return sync_pod(
            observed.job, wanted, number, defaults, commit, queue=observed.queue, base=base
        )
    return serve_pod(
        observed.job,
        wanted,
        way.store,
        number,
        defaults,
        commit,
        queue=observed.queue,
        last_revision=sync_results.revision(observed),
        node=delivery.node(observed) if way.store == "claim" else "",
    )


def stale(observed: Observed) -> tuple[Delete, ...]:
    """Sync pods that make room for one more; the last one that ended well stays."""
    good = sync_results.done(observed)[-1:]
    older = observed.workspace.sync_pods[: -KEPT_SYNC_PODS + 1]
    return tuple(delete_pod(pod) for pod in older if pod not in good)


def retry_left(observed: Observed, now: datetime) -> float:
    """Seconds until another sync pod may follow the last one; 0 where that did not fail."""
    latest = observed.workspace.sync_pods[-1] if observed.workspace.sync_pods else None
    if latest is None or latest.status.phase != "Failed":
        return 0.0
    return retry.left(latest, end_of(latest, names.SYNC_CONTAINER), now)


def end_preparations(observed: Observed, *, serving: bool = True) -> tuple[Delete, ...]:
    """Sync and setup pods that still run; those that serve only if `serving`."""
    return tuple(
        delete_pod(pod)
        for pod in (*observed.workspace.sync_pods, *observed.workspace.setup_pods)
        if alive(pod) and not pod.metadata.terminating
        if serving or not delivery.serves(pod)
    )


def _lost_before(observed: Observed, pod: Pod) -> Workspace | None:
    """The only copy of an upload went with the pod before: nobody but the user has another."""
    job, known = observed.job, observed.job.status.workspace_revision
    only = pod.metadata.annotations.delivery == "ephemeral" and not workspace_source.is_fetched(job)
    if not (only and known) or sync_results.done(observed):
        return None
    if pod.status.phase != "Running" or delivery.has_content(pod):
        return None
    why = Reason(
        "WorkspaceLost",
        f"the workspace of revision {known} was on storage of a pod that is gone; send it again"
        f" to pod {pod.metadata.name}: kubectl torchrun sync {job.metadata.name}",
    )
    return replace(syncing(why), failed=True)


def _why_syncing(observed: Observed, pod: Pod) -> Reason:
    """What the workspace waits for."""
    job = observed.job
    name = names.workspace_claim(job.metadata.name)
    held = named(observed.workspace.claims, name)
    if delivery.serves(pod) and delivery.has_content(pod):
        return Reason("SyncPodStarting", f"pod {pod.metadata.name} is about to serve the workspace")
    if pod.status.phase == "Running" and workspace_source.is_fetched(job):
        return Reason(
            "Fetching", f"pod {pod.metadata.name} fetches {workspace_source.describe_source(job)}"
        )
    if pod.status.phase == "Running" and delivery.takes_upload(pod):
        return Reason(
            "WaitingForUpload",
            f"pod {pod.metadata.name} takes the upload; if none runs:"
            f" kubectl torchrun sync {job.metadata.name}",
        )
    mounted = (held,) if held and pod.metadata.annotations.delivery != "ephemeral" else ()
    why = waiting.pod_reason(pod, mounted, observed.cluster.warnings)
    # The scheduler's word on a claim stands until its next look, although the claim is bound.
    bound = held is not None and held.status.phase == "Bound"
    if why is None or (why.reason == "ClaimPending" and bound):
        return Reason("SyncPodStarting", f"pod {pod.metadata.name} is starting")
    return Reason(why.reason, f"pod {pod.metadata.name}: {why.message}")
