"""The workspace: its claim, the sync pod that fills it, and how far that is."""

from datetime import datetime, timedelta
from enum import Enum

import msgspec
from msgspec.structs import replace

from torchrun_api import names
from torchrun_api.core import PersistentVolumeClaim, Pod
from torchrun_api.job import TorchrunJob
from torchrun_controller.reconcile.observed import Defaults, Observed
from torchrun_controller.reconcile.placement import waiting
from torchrun_controller.reconcile.plan import Apply, Delete
from torchrun_controller.reconcile.run import Claim, Served
from torchrun_controller.reconcile.workers import Why, alive, delete
from torchrun_controller.reconcile.workspace import delivery, source, tries
from torchrun_controller.reconcile.workspace.delivery import Route, route
from torchrun_controller.reconcile.workspace.serve_pod import serve_pod
from torchrun_controller.reconcile.workspace.storage import claim
from torchrun_controller.reconcile.workspace.sync_pod import sync_pod
from torchrun_controller.reconcile.workspace.tries import Verdict, end_of

BASE_WAIT = timedelta(seconds=20)
KEPT_SYNC_PODS = 3
NO_WORKSPACE = Why("NoWorkspace", "the code is in the image")
SYNCED = Why("Synced", "the workspace is in its claim")


class Progress(Enum):
    """How far the workspace is."""

    READY = "Ready"
    SYNCING = "Syncing"
    REFUSED = "Refused"


class Workspace(msgspec.Struct, frozen=True, kw_only=True):
    """How far the workspace is, and what is to be made or removed now.

    `commit` is what a ready one was made of, where its sync pod has said so; `content` tells it
    from every other, "" where nothing does.
    """

    progress: Progress
    why: Why
    commit: str = ""
    content: str = ""
    served: Served | None = None
    applies: tuple[Apply, ...] = ()
    deletes: tuple[Delete, ...] = ()
    requeue_after: float | None = None


def prepare(
    observed: Observed, wanted: Claim | None, now: datetime, defaults: Defaults
) -> Workspace:
    """Decide the next step towards a ready workspace."""
    if wanted is None:
        return Workspace(progress=Progress.READY, why=NO_WORKSPACE)
    if wanted.existing:
        why = Why("Existing", f"claim {wanted.name} is mounted as it is, read-only")
        return Workspace(progress=Progress.READY, why=why)
    job = observed.job
    held = next((c for c in observed.claims if c.metadata.name == wanted.name), None)
    latest = observed.sync_pods[-1] if observed.sync_pods else None
    way = route(observed, wanted, held, now)
    if held is None and way.store != "ephemeral":
        number = 0 if latest is None else names.number_of(latest.metadata.name) + 1
        return Workspace(
            progress=Progress.SYNCING,
            why=Why("Creating", f"claim {wanted.name} and a sync pod are being made"),
            applies=(
                claim(job, wanted, names.WORKSPACE),
                _pod(job, wanted, way, number, defaults, _pinned(job, latest), _base(observed)),
            ),
        )
    made = None if way.store else published(observed)
    if made is not None:
        return _ready(job, made)
    if latest is None:
        assert held is not None
        if not way.store and held.status.phase != "Pending" and _was_ready(job):
            return _ready(job, Verdict())
        return _next_pod(observed, wanted, way, 0, defaults)
    number = names.number_of(latest.metadata.name)
    current = takes(job, latest) and latest.metadata.annotations.delivery == way.store
    if latest.metadata.deletion_timestamp is not None:
        reason = delivery.REASON if delivery.decided(observed) else "SyncPodEnding"
        return _syncing(Why(reason, f"pod {latest.metadata.name} is being deleted"))
    match latest.status.phase:
        case "Running" if current and delivery.serves(latest) and delivery.is_serving(latest):
            return _ready_to_serve(job, latest, way)
        case "Failed" if current:
            return _after_failure(observed, wanted, way, latest, now, defaults)
        case "Succeeded" | "Failed":
            return _next_pod(observed, wanted, way, number + 1, defaults)
        case _ if not current:
            return _replace(latest, way)
        case _ if (said := _said(latest)).reason:
            return _started_again(observed.job, said)
        case "" | "Pending" if (left := _base_left(latest, now)) is not None:
            if left <= 0:
                # The next one is made without: only the pod that comes with its claim has a base.
                return _replace(latest, way)
            return replace(_syncing(_why_syncing(observed, latest, held)), requeue_after=left)
        case _:
            why = _why_syncing(observed, latest, held)
            return replace(_syncing(why), requeue_after=way.left)


def published(observed: Observed) -> Verdict | None:
    """What the last sync pod that ended well has made, where that is what the job asks for."""
    job, done = observed.job, _done(observed)
    if not done:
        return None
    made = _said(done[-1])
    same = made.sha256 == source.upload_digest(job) and takes(job, done[-1])
    return made if same or _is_current(job, done[-1]) else None


def revision(observed: Observed) -> int:
    """The newest revision of the workspace that is known to be whole; 0 for none."""
    made = (_said(pod).revision for pod in _done(observed))
    known = max(made, default=0) or observed.job.status.workspace_revision
    said = observed.job.metadata.annotations.get(names.WORKSPACE_REVISION, "")
    return known + 1 if known and said == str(known + 1) else known


def _done(observed: Observed) -> list[Pod]:
    """Sync pods that ended well; what those before the present claim made is gone with theirs."""
    name = names.workspace_claim(observed.job.metadata.name)
    held = next((c for c in observed.claims if c.metadata.name == name), None)
    since = held.metadata.creation_timestamp if held else None
    return [
        pod
        for pod in observed.sync_pods
        if pod.status.phase == "Succeeded"
        and not (since and (made := pod.metadata.creation_timestamp) and made < since)
    ]


def takes(job: TorchrunJob, pod: Pod) -> bool:
    """Whether the pod takes what the job asks for, be it among other things."""
    stands_by = bool(pod.metadata.annotations.after_revision)
    return _is_current(job, pod) or (stands_by and not source.is_fetched(job))


def _base(observed: Observed) -> str:
    """The job whose workspace the first sync pod can mount beside its own; "" for none.

    It may go with what else mounts it, or has it for itself.
    """
    base = observed.base
    if base is None or base.claim.status.phase != "Bound":
        return ""
    if base.claim.metadata.deletion_timestamp or base.claim.metadata.labels.component != (
        names.WORKSPACE
    ):
        return ""
    shared = {"ReadWriteMany", "ReadOnlyMany"} & {*base.claim.spec.access_modes}
    return "" if base.in_use and not shared else base.claim.metadata.labels.torchrun_job


def _base_left(pod: Pod, now: datetime) -> float | None:
    """Seconds that a pod with a base has to start; None where it has none."""
    created = pod.metadata.creation_timestamp
    if not pod.metadata.annotations.workspace_base or created is None:
        return None
    return (created + BASE_WAIT - now).total_seconds()


def _ready(job: TorchrunJob, said: Verdict) -> Workspace:
    content = source.upload_digest(job) or said.commit or job.status.workspace_commit or said.sha256
    return Workspace(progress=Progress.READY, why=SYNCED, commit=said.commit, content=content)


def _ready_to_serve(job: TorchrunJob, pod: Pod, way: Route) -> Workspace:
    said = _said(pod)
    served = Served(url=delivery.url(pod), manifest=said.manifest)
    return replace(_ready(job, said), why=delivery.delivered(pod, way.why), served=served)


def said(observed: Observed) -> Why | None:
    """How the workspace of a gang that is there came to be, where its sync pod is there still."""
    if not observed.sync_pods:
        return None
    known = (c for c in observed.job.status.conditions if c.type == "WorkspaceReady")
    if delivery.serves(observed.sync_pods[-1]):
        return next((Why(c.reason, c.message) for c in known if c.status == "True"), None)
    return SYNCED


def _is_current(job: TorchrunJob, pod: Pod) -> bool:
    """Whether the pod was made for the source that the job names now."""
    made_for = pod.metadata.annotations
    return (made_for.workspace_sha256, made_for.source) == (
        source.upload_digest(job),
        source.digest(job),
    )


def _pinned(job: TorchrunJob, latest: Pod | None) -> str:
    """The commit that must come again: code never changes under a gang unless somebody asks."""
    asked = latest is not None and not _is_current(job, latest)
    return "" if asked or job.status.workers is None else job.status.workspace_commit


def _syncing(why: Why) -> Workspace:
    return Workspace(progress=Progress.SYNCING, why=why)


def _was_ready(job: TorchrunJob) -> bool:
    """A sync pod may be deleted by hand once it is done; the condition remembers it."""
    return any(c.type == "WorkspaceReady" and c.status == "True" for c in job.status.conditions)


def _pod(
    job: TorchrunJob,
    wanted: Claim,
    way: Route,
    number: int,
    defaults: Defaults,
    commit: str,
    base: str = "",
) -> Apply:
    if way.store:
        return serve_pod(job, wanted, way.store, number, defaults, commit)
    return sync_pod(job, wanted, number, defaults, commit, base=base)


def _next_pod(
    observed: Observed, wanted: Claim, way: Route, number: int, defaults: Defaults
) -> Workspace:
    """One more sync pod; only the last few are kept."""
    latest = observed.sync_pods[-1] if observed.sync_pods else None
    pod = _pod(observed.job, wanted, way, number, defaults, _pinned(observed.job, latest))
    return Workspace(
        progress=Progress.SYNCING,
        why=Why("Creating", "a sync pod is being made"),
        applies=(pod,),
        deletes=stale(observed),
    )


def stale(observed: Observed) -> tuple[Delete, ...]:
    """Sync pods that make room for one more."""
    return tuple(delete(pod) for pod in observed.sync_pods[: -KEPT_SYNC_PODS + 1])


def retry_left(observed: Observed, now: datetime) -> float:
    """Seconds until another sync pod may follow the last one; 0 where that did not fail."""
    latest = observed.sync_pods[-1] if observed.sync_pods else None
    if latest is None or latest.status.phase != "Failed":
        return 0.0
    return tries.left(latest, end_of(latest, names.SYNC_CONTAINER), now)


def _said(pod: Pod) -> Verdict:
    return end_of(pod, names.SYNC_CONTAINER).said


def _replace(pod: Pod, way: Route) -> Workspace:
    """The job names another source, or goes another way: the pod that is at the old one ends."""
    why = Why("Replacing", "the job names another source; the sync pod is being replaced")
    if pod.metadata.annotations.delivery != way.store:
        told = f"{way.why}; a pod will serve the workspace" if way.store else "a claim is used now"
        why = Why(delivery.REASON if way.store else "Replacing", told)
    return Workspace(progress=Progress.SYNCING, why=why, deletes=(delete(pod),))


def end_preparations(observed: Observed, *, serving: bool = True) -> tuple[Delete, ...]:
    """Sync and setup pods that still run; those that serve only if `serving`."""
    return tuple(
        delete(pod)
        for pod in (*observed.sync_pods, *observed.setup_pods)
        if alive(pod) and pod.metadata.deletion_timestamp is None
        if serving or not delivery.serves(pod)
    )


def _after_failure(
    observed: Observed,
    wanted: Claim,
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
    left = tries.left(pod, end, now)
    if left <= 0:
        return _next_pod(observed, wanted, way, number + 1, defaults)
    return Workspace(
        progress=Progress.SYNCING,
        why=Why(
            said.reason or "SyncFailed",
            f"{text}; tried again {tries.delay(pod).total_seconds():.0f} s after the failure",
        ),
        requeue_after=left,
    )


def _refused(job: TorchrunJob, said: Verdict, text: str) -> Workspace:
    mend = f"mend it, then run: kubectl torchrun sync {job.metadata.name}"
    if source.is_fetched(job):
        mend = f"change spec.volumes.workspace, or {mend}"
    why = Why(said.reason or "SyncFailed", f"{text}; {mend}")
    return Workspace(progress=Progress.REFUSED, why=why)


def _started_again(job: TorchrunJob, said: Verdict) -> Workspace:
    """A serve pod lives on when the container that makes the workspace fails: the kubelet tries."""
    if said.permanent:
        return _refused(job, said, said.message)
    return _syncing(Why(said.reason, f"{said.message}; it is tried again"))


def _why_syncing(observed: Observed, pod: Pod, held: PersistentVolumeClaim | None) -> Why:
    """What the workspace waits for."""
    job = observed.job
    if delivery.serves(pod) and delivery.has_content(pod):
        return Why("SyncPodStarting", f"pod {pod.metadata.name} is about to serve the workspace")
    if pod.status.phase == "Running" and source.is_fetched(job):
        return Why("Fetching", f"pod {pod.metadata.name} fetches {source.described(job)}")
    if pod.status.phase == "Running":
        return Why(
            "WaitingForUpload",
            f"pod {pod.metadata.name} takes the upload; if none runs:"
            f" kubectl torchrun sync {job.metadata.name}",
        )
    mounted = (held,) if held and pod.metadata.annotations.delivery != "ephemeral" else ()
    why = waiting.of_pod(pod, mounted, observed.warnings)
    # The scheduler's word on a claim stands until its next look, although the claim is bound.
    bound = held is not None and held.status.phase == "Bound"
    if why is None or (why.reason == "ClaimPending" and bound):
        return Why("SyncPodStarting", f"pod {pod.metadata.name} is starting")
    return Why(why.reason, f"pod {pod.metadata.name}: {why.message}")
