"""The workspace: its claim, the sync pod that fills it, and how far that is."""

from datetime import datetime, timedelta
from enum import Enum

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
from torchrun_controller.reconcile.pods.lifecycle import alive, delete
from torchrun_controller.reconcile.spec.resolve import ResolvedSpec, Served, VolumeSource
from torchrun_controller.reconcile.workspace import delivery, retry, sync_results
from torchrun_controller.reconcile.workspace.claims import named, terminating
from torchrun_controller.reconcile.workspace.delivery import Route, route
from torchrun_controller.reconcile.workspace.retry import SyncMessage, end_of

BASE_WAIT = timedelta(seconds=20)
KEPT_SYNC_PODS = 3
NO_WORKSPACE = Reason("NoWorkspace", "the code is in the image")
SYNCED = Reason("Synced", "the workspace is in its claim")


class SyncState(Enum):
    """How far the workspace is."""

    READY = "Ready"
    SYNCING = "Syncing"
    REFUSED = "Refused"


class Workspace(msgspec.Struct, frozen=True, kw_only=True):
    """How far the workspace is, and what is to be made or removed now.

    `commit` is what a ready one was made of, where its sync pod has said so; `content` tells it
    from every other, "" where nothing does. `failed`: a try came to nothing.
    """

    state: SyncState
    why: Reason
    commit: str = ""
    content: str = ""
    served: Served | None = None
    failed: bool = False
    applies: tuple[Apply, ...] = ()
    deletes: tuple[Delete, ...] = ()
    status_before_deletes: bool = False  # see Plan
    requeue_after: float | None = None


def prepare(
    observed: Observed, wanted: VolumeSource | None, now: datetime, defaults: Defaults
) -> Workspace:
    """Decide the next step towards a ready workspace."""
    given = _given(wanted)
    if given is not None:
        return Workspace(state=SyncState.READY, why=given)
    assert wanted is not None, "nothing is to be prepared"
    held = named(observed.workspace.claims, wanted.name)
    way = route(observed, wanted, held, now)
    ending = terminating(observed.workspace.claims, wanted.name)
    if ending is not None and way.store != "ephemeral":
        # What mounts it would keep it for ever.
        return replace(_syncing(ending), deletes=end_preparations(observed))
    latest = observed.workspace.sync_pods[-1] if observed.workspace.sync_pods else None
    if held is None and way.store != "ephemeral":
        number = 0 if latest is None else names.number_of(latest.metadata.name) + 1
        pod = _pod(observed, wanted, way, number, defaults, _base(observed))
        return Workspace(
            state=SyncState.SYNCING,
            why=Reason("Creating", f"claim {wanted.name} and a sync pod are being made"),
            applies=(claim(observed.job, wanted, names.WORKSPACE), pod),
        )
    found = sync_results.newest(observed, way.store)
    if found is not None and _is_at_hand(observed, found, now):
        return _ready(observed.job, found, way)
    if latest is None:
        return _next_pod(observed, wanted, way, 0, defaults)
    return _after(observed, wanted, way, latest, now, defaults)


def _after(
    observed: Observed,
    wanted: VolumeSource,
    way: Route,
    latest: Pod,
    now: datetime,
    defaults: Defaults,
) -> Workspace:
    """The step after what has become of the last pod."""
    job, number = observed.job, names.number_of(latest.metadata.name)
    current = sync_results.takes(job, latest) and latest.metadata.annotations.delivery == way.store
    lost = nodes.loss(observed, latest, now) if alive(latest) else None
    if lost is not None:
        return _after_loss(observed, wanted, way, latest, lost, defaults)
    if latest.metadata.terminating:
        reason = delivery.REASON if delivery.decided(observed) else "SyncPodEnding"
        return _syncing(Reason(reason, f"pod {latest.metadata.name} is being deleted"))
    match latest.status.phase:
        case "Failed" if current:
            return _after_failure(observed, wanted, way, latest, now, defaults)
        case "Succeeded" | "Failed":
            return _next_pod(observed, wanted, way, number + 1, defaults)
        case _ if not current and way.store and delivery.has_content(latest):
            # It goes on serving: what is asked for may never come.
            return _next_pod(observed, wanted, way, number + 1, defaults)
        case _ if not current:
            return _replace(latest, way)
        case _ if (said := sync_results.verdict(latest)).reason:
            return _started_again(job, said)
        case "" | "Pending" if (left := _base_left(latest, now)) is not None:
            if left <= 0:
                # The next one is made without: only the pod that comes with its claim has a base.
                return _replace(latest, way)
            return replace(_syncing(_why_syncing(observed, latest)), requeue_after=left)
        case _:
            step = _lost_before(observed, latest) or _syncing(_why_syncing(observed, latest))
            return replace(step, requeue_after=way.left)


def _is_at_hand(observed: Observed, pod: Pod, now: datetime) -> bool:
    """Whether what the pod made can be had now: from the claim, or from itself."""
    if not delivery.serves(pod):
        return True
    return delivery.is_serving(pod) and nodes.loss(observed, pod, now) is None


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


def _syncing(why: Reason) -> Workspace:
    return Workspace(state=SyncState.SYNCING, why=why)


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
        known=sync_results.revision(observed),
        node=delivery.node(observed) if way.store == "claim" else "",
    )


def _next_pod(
    observed: Observed, wanted: VolumeSource, way: Route, number: int, defaults: Defaults
) -> Workspace:
    """One more sync pod; only the last few are kept."""
    return Workspace(
        state=SyncState.SYNCING,
        why=Reason("Creating", "a sync pod is being made"),
        applies=(_pod(observed, wanted, way, number, defaults),),
        deletes=stale(observed),
    )


def stale(observed: Observed) -> tuple[Delete, ...]:
    """Sync pods that make room for one more; the last one that ended well stays."""
    good = sync_results.done(observed)[-1:]
    older = observed.workspace.sync_pods[: -KEPT_SYNC_PODS + 1]
    return tuple(delete(pod) for pod in older if pod not in good)


def retry_left(observed: Observed, now: datetime) -> float:
    """Seconds until another sync pod may follow the last one; 0 where that did not fail."""
    latest = observed.workspace.sync_pods[-1] if observed.workspace.sync_pods else None
    if latest is None or latest.status.phase != "Failed":
        return 0.0
    return retry.left(latest, end_of(latest, names.SYNC_CONTAINER), now)


def _replace(pod: Pod, way: Route) -> Workspace:
    """The job names another source, or goes another way: the pod that is at the old one ends."""
    why = Reason("Replacing", "the job names another source; the sync pod is being replaced")
    if pod.metadata.annotations.delivery != way.store:
        told = f"{way.why}; a pod will serve the workspace" if way.store else "a claim is used now"
        why = Reason(delivery.REASON if way.store else "Replacing", told)
    # Without the pod only the status tells that the claim was given up; else the next waits again.
    gives_up = way.store == "ephemeral"
    return Workspace(
        state=SyncState.SYNCING, why=why, deletes=(delete(pod),), status_before_deletes=gives_up
    )


def end_preparations(observed: Observed, *, serving: bool = True) -> tuple[Delete, ...]:
    """Sync and setup pods that still run; those that serve only if `serving`."""
    return tuple(
        delete(pod)
        for pod in (*observed.workspace.sync_pods, *observed.workspace.setup_pods)
        if alive(pod) and not pod.metadata.terminating
        if serving or not delivery.serves(pod)
    )


def _after_failure(
    observed: Observed,
    wanted: VolumeSource,
    way: Route,
    pod: Pod,
    now: datetime,
    defaults: Defaults,
) -> Workspace:
    """What cannot succeed waits for its mending; the rest is tried again with growing delays."""
    end = end_of(pod, names.SYNC_CONTAINER)
    said = end.said
    text = said.message or "the sync pod failed"
    if said.permanent:
        return _refused(observed.job, said, text)
    number = names.number_of(pod.metadata.name)
    left = retry.left(pod, end, now)
    if left <= 0:
        return _next_pod(observed, wanted, way, number + 1, defaults)
    return Workspace(
        state=SyncState.SYNCING,
        why=Reason(
            said.reason or "SyncFailed",
            f"{text}; tried again {retry.delay(pod).total_seconds():.0f} s after the failure",
        ),
        failed=True,
        requeue_after=left,
    )


def _after_loss(
    observed: Observed,
    wanted: VolumeSource,
    way: Route,
    pod: Pod,
    loss: nodes.Loss,
    defaults: Defaults,
) -> Workspace:
    """Another pod takes the place of one whose node nobody hears of."""
    step = _next_pod(observed, wanted, way, names.number_of(pod.metadata.name) + 1, defaults)
    ends = () if pod.metadata.terminating else (delete(pod),)
    why = Reason(
        "SyncPodLost", f"{loss.message}; another pod takes the place of {pod.metadata.name}"
    )
    deletes = tuple(d for d in step.deletes if d.uid != pod.metadata.uid)
    return replace(step, why=why, deletes=(*deletes, *ends))


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
    return replace(_syncing(why), failed=True)


def _refused(job: TorchrunJob, said: SyncMessage, text: str) -> Workspace:
    mend = f"mend it, then run: kubectl torchrun sync {job.metadata.name}"
    if workspace_source.is_fetched(job) and job.status.workers is None:
        mend = f"change spec.volumes.workspace, or {mend}"
    why = Reason(said.reason or "SyncFailed", f"{text}; {mend}")
    return Workspace(state=SyncState.REFUSED, why=why, failed=True)


def _started_again(job: TorchrunJob, said: SyncMessage) -> Workspace:
    """A serve pod lives on when the container that makes the workspace fails: the kubelet tries."""
    if said.permanent:
        return _refused(job, said, said.message)
    why = Reason(said.reason, f"{said.message}; it is tried again")
    return replace(_syncing(why), failed=True)


def _why_syncing(observed: Observed, pod: Pod) -> Reason:
    """What the workspace waits for."""
    job = observed.job
    name = names.workspace_claim(job.metadata.name)
    held = named(observed.workspace.claims, name)
    if delivery.serves(pod) and delivery.has_content(pod):
        return Reason("SyncPodStarting", f"pod {pod.metadata.name} is about to serve the workspace")
    if pod.status.phase == "Running" and workspace_source.is_fetched(job):
        return Reason(
            "Fetching", f"pod {pod.metadata.name} fetches {workspace_source.described(job)}"
        )
    if pod.status.phase == "Running" and delivery.takes_upload(pod):
        return Reason(
            "WaitingForUpload",
            f"pod {pod.metadata.name} takes the upload; if none runs:"
            f" kubectl torchrun sync {job.metadata.name}",
        )
    mounted = (held,) if held and pod.metadata.annotations.delivery != "ephemeral" else ()
    why = waiting.of_pod(pod, mounted, observed.cluster.warnings)
    # The scheduler's word on a claim stands until its next look, although the claim is bound.
    bound = held is not None and held.status.phase == "Bound"
    if why is None or (why.reason == "ClaimPending" and bound):
        return Reason("SyncPodStarting", f"pod {pod.metadata.name} is starting")
    return Reason(why.reason, f"pod {pod.metadata.name}: {why.message}")
