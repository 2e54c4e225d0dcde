"""The workspace: its claim, the sync pod that fills it, and how far that is."""

from datetime import datetime, timedelta
from enum import Enum

import msgspec

from torchrun_api import names
from torchrun_api.core import PersistentVolumeClaim, Pod
from torchrun_api.job import TorchrunJob
from torchrun_api.json import JsonObject
from torchrun_api.kinds import PODS
from torchrun_api.meta import Wire
from torchrun_controller.reconcile import waiting
from torchrun_controller.reconcile.objects import RESTRICTED_CONTAINER, RUNTIME_USER, env, metadata
from torchrun_controller.reconcile.observed import Defaults, Observed
from torchrun_controller.reconcile.plan import Apply, Delete
from torchrun_controller.reconcile.run import Claim
from torchrun_controller.reconcile.storage import claim
from torchrun_controller.reconcile.workers import Why, alive, delete

SYNC_DIR = "/workspace"
FIRST_RETRY = timedelta(seconds=10)
LONGEST_RETRY = timedelta(minutes=5)
KEPT_SYNC_PODS = 3
NO_WORKSPACE = Why("NoWorkspace", "the code is in the image")
SYNCED = Why("Synced", "the workspace is in its claim")


class Progress(Enum):
    """How far the workspace is."""

    READY = "Ready"
    SYNCING = "Syncing"
    REFUSED = "Refused"


class Workspace(msgspec.Struct, frozen=True, kw_only=True):
    """How far the workspace is, and what is to be made or removed now."""

    progress: Progress
    why: Why
    applies: tuple[Apply, ...] = ()
    deletes: tuple[Delete, ...] = ()
    requeue_after: float | None = None


class SyncVerdict(Wire, frozen=True, kw_only=True):
    """The termination message of a sync pod."""

    reason: str = ""
    message: str = ""
    permanent: bool = False


def prepare(
    observed: Observed, wanted: Claim | None, now: datetime, defaults: Defaults
) -> Workspace:
    """Decide the next step towards a ready workspace."""
    if wanted is None:
        return Workspace(progress=Progress.READY, why=NO_WORKSPACE)
    job = observed.job
    held = next((c for c in observed.claims if c.metadata.name == wanted.name), None)
    latest = observed.sync_pods[-1] if observed.sync_pods else None
    if held is None:
        number = 0 if latest is None else _number(latest) + 1
        return Workspace(
            progress=Progress.SYNCING,
            why=Why("Creating", f"claim {wanted.name} and a sync pod are being made"),
            applies=(claim(job, wanted, names.WORKSPACE), sync_pod(job, wanted, number, defaults)),
        )
    if latest is None:
        if _was_ready(job):
            return _ready()
        return _next_pod(observed, wanted, 0, defaults)
    number = _number(latest)
    current = latest.metadata.annotations.workspace_sha256 == _digest(job)
    if latest.metadata.deletion_timestamp is not None:
        return _syncing(Why("SyncPodEnding", f"pod {latest.metadata.name} is being deleted"))
    match latest.status.phase:
        case "Succeeded" if current:
            return _ready()
        case "Failed" if current:
            return _after_failure(observed, wanted, latest, now, defaults)
        case "Succeeded" | "Failed":
            return _next_pod(observed, wanted, number + 1, defaults)
        case _ if not current:
            return _replace(latest)
        case _:
            return _syncing(_why_syncing(observed, latest, held))


def _ready() -> Workspace:
    return Workspace(progress=Progress.READY, why=SYNCED)


def _syncing(why: Why) -> Workspace:
    return Workspace(progress=Progress.SYNCING, why=why)


def _was_ready(job: TorchrunJob) -> bool:
    """A sync pod may be deleted by hand once it is done; the condition remembers it."""
    return any(c.type == "WorkspaceReady" and c.status == "True" for c in job.status.conditions)


def _digest(job: TorchrunJob) -> str:
    return job.metadata.annotations.get(names.WORKSPACE_SHA256, "")


def _number(pod: Pod) -> int:
    suffix = pod.metadata.name.rpartition("-")[2]
    return int(suffix) if suffix.isdecimal() else 0


def _next_pod(observed: Observed, wanted: Claim, number: int, defaults: Defaults) -> Workspace:
    """One more sync pod; only the last few are kept."""
    stale = observed.sync_pods[: -KEPT_SYNC_PODS + 1]
    return Workspace(
        progress=Progress.SYNCING,
        why=Why("Creating", "a sync pod is being made"),
        applies=(sync_pod(observed.job, wanted, number, defaults),),
        deletes=tuple(delete(pod) for pod in stale),
    )


def _replace(pod: Pod) -> Workspace:
    """The job names another upload now: the pod that waits for the old one goes first."""
    return Workspace(
        progress=Progress.SYNCING,
        why=Why("Replacing", "the job names another upload; the sync pod is being replaced"),
        deletes=(delete(pod),),
    )


def end_sync_pods(observed: Observed) -> tuple[Delete, ...]:
    """Sync pods that still run."""
    return tuple(
        delete(pod)
        for pod in observed.sync_pods
        if alive(pod) and pod.metadata.deletion_timestamp is None
    )


def _after_failure(
    observed: Observed, wanted: Claim, pod: Pod, now: datetime, defaults: Defaults
) -> Workspace:
    """What cannot succeed waits for its mending; the rest is tried again with growing delays."""
    ended, said = _end(pod)
    text = said.message or pod.status.message or "the sync pod failed"
    if said.permanent:
        mend = f"mend it, then run: kubectl torchrun sync {observed.job.metadata.name}"
        return Workspace(
            progress=Progress.REFUSED, why=Why(said.reason or "SyncFailed", f"{text}; {mend}")
        )
    number = _number(pod)
    delay = min(FIRST_RETRY * 2 ** min(number, 10), LONGEST_RETRY)
    left = ((ended or now) + delay - now).total_seconds()
    if left <= 0:
        return _next_pod(observed, wanted, number + 1, defaults)
    return Workspace(
        progress=Progress.SYNCING,
        why=Why(
            said.reason or pod.status.reason or "SyncFailed",
            f"{text}; tried again {delay.total_seconds():.0f} s after the failure",
        ),
        requeue_after=left,
    )


def _end(pod: Pod) -> tuple[datetime | None, SyncVerdict]:
    for container in pod.status.container_statuses:
        if container.state.terminated is not None:
            ended = container.state.terminated
            try:
                return ended.finished_at, msgspec.json.decode(ended.message, type=SyncVerdict)
            except msgspec.DecodeError:
                return ended.finished_at, SyncVerdict()
    return pod.metadata.creation_timestamp, SyncVerdict()


def _why_syncing(observed: Observed, pod: Pod, held: PersistentVolumeClaim) -> Why:
    """What the workspace waits for."""
    name = observed.job.metadata.name
    if pod.status.phase == "Running":
        return Why(
            "WaitingForUpload",
            f"pod {pod.metadata.name} takes the upload; if none runs: kubectl torchrun sync {name}",
        )
    why = waiting.of_pod(pod, (held,), observed.warnings)
    # The scheduler's word on a claim stands until its next look, although the claim is bound.
    if why is None or (why.reason == "ClaimPending" and held.status.phase == "Bound"):
        return Why("SyncPodStarting", f"pod {pod.metadata.name} is starting")
    return Why(why.reason, f"pod {pod.metadata.name}: {why.message}")


def sync_pod(job: TorchrunJob, wanted: Claim, number: int, defaults: Defaults) -> Apply:
    """The only writer of the workspace, under the restricted Pod Security profile."""
    digest = _digest(job)
    meta = metadata(job, names.sync_pod(job.metadata.name, number), names.SYNC)
    if digest:
        meta["annotations"] = {names.WORKSPACE_SHA256: digest}
    container: JsonObject = {
        "name": names.SYNC_CONTAINER,
        "image": defaults.runtime_image,
        "imagePullPolicy": defaults.runtime_image_pull_policy,
        "command": ["torchrun-sync"],
        "env": [
            *env(
                TORCHRUN_SYNC_SOURCE="zip",
                TORCHRUN_SYNC_DIR=SYNC_DIR,
                TORCHRUN_SYNC_PORT=str(names.SYNC_PORT),
                TORCHRUN_SYNC_SHA256=digest or None,
            )
        ],
        "ports": [{"name": "upload", "containerPort": names.SYNC_PORT, "protocol": "TCP"}],
        "readinessProbe": {
            "httpGet": {"path": "/readyz", "port": "upload"},
            "periodSeconds": 1,
        },
        "resources": {
            "requests": {"cpu": "100m", "memory": "64Mi"},
            "limits": {"memory": "512Mi"},
        },
        "securityContext": RESTRICTED_CONTAINER,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "workspace", "mountPath": SYNC_DIR},
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108  # the path that libraries know
        ],
    }
    body: JsonObject = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": meta,
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": RUNTIME_USER,
                "runAsGroup": RUNTIME_USER,
                "fsGroup": RUNTIME_USER,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container],
            "volumes": [
                {"name": "workspace", "persistentVolumeClaim": {"claimName": wanted.name}},
                {"name": "tmp", "emptyDir": {"sizeLimit": "64Mi"}},
            ],
        },
    }
    return Apply(PODS, body)
