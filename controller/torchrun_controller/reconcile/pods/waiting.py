"""Why pods do not start: what scheduler, kubelet, quota and storage say, summed up over a gang."""

import re

from torchrun_api.core import CoreEvent, Job, PersistentVolumeClaim, Pod
from torchrun_controller.reconcile.model.conditions import Reason
from torchrun_controller.reconcile.pods.lifecycle import index_of, scheduled
from torchrun_controller.reconcile.pods.unschedulable import summary

IMAGE_REASONS = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "ErrImageNeverPull",
        "InvalidImageName",
        "ImageInspectError",
        "RegistryUnavailable",
    }
)
STARTING = frozenset({"", "PodInitializing", "ContainerCreating"})
CREATE_EVENTS = frozenset({"FailedCreate"})
PROVISIONING_EVENTS = frozenset({"ProvisioningFailed"})
MOUNT_EVENTS = frozenset({"FailedAttachVolume", "FailedMount"})
# Of a long list of different reasons the first ones say enough.
TOLD_APART = 3

_UNBOUND = "unbound immediate PersistentVolumeClaims"
_NO_CLAIM = re.compile(r'persistentvolumeclaim "(?P<name>[^"]+)" not found')
# apiserver/pkg/admission/plugin/resourcequota/controller.go
_QUOTA = re.compile(
    r"exceeded quota: (?P<name>[^,]+), requested: (?P<requested>.*), used: (?P<used>.*),"
    r" limited: (?P<limited>.*)"
)
# The pod's name is another one at each try.
_REFUSED_POD = re.compile(r'^(Error creating: )?(pods? "[^"]*" is forbidden: )?')
# The kubelet's words between two pulls; the ones about the pull itself follow.
_BACK_OFF = re.compile(r'^Back-off pulling image "[^"]*": (ErrImagePull: )?')


def of_gang(
    jobs: tuple[Job, ...],
    nodes: int,
    workers: tuple[Pod, ...],
    claims: tuple[PersistentVolumeClaim, ...],
    warnings: tuple[CoreEvent, ...],
) -> Reason | None:
    """The first reason that any worker gives, in the order of their indexes; alike ones as one.

    `jobs` are to make pods for so many `nodes`.
    """
    if len(workers) < nodes:
        told = (_last(warnings, job.metadata.uid, CREATE_EVENTS) for job in jobs)
        refused = next(filter(None, told), None)
        if refused is not None:
            why = refusal(refused.message)
            return Reason(why.reason, f"{len(workers)} of {nodes} pods are made; {why.message}")
    pending = [pod for pod in sorted(workers, key=index_of) if pod.status.phase == "Pending"]
    asked = [(pod, of_pod(pod, claims, warnings)) for pod in pending]
    waiting = [(pod, why) for pod, why in asked if why is not None]
    if not waiting:
        return None
    reason = waiting[0][1].reason
    alike: dict[str, list[Pod]] = {}
    for pod, why in waiting:
        if why.reason == reason:
            alike.setdefault(why.message, []).append(pod)
    whys = [f"{_whom(pods, nodes)}: {text}" for text, pods in alike.items()]
    placed = f"{scheduled(workers)} of {nodes} workers have a node"
    return Reason(reason, "; ".join([placed, *whys[:TOLD_APART]]))


def _whom(pods: list[Pod], nodes: int) -> str:
    first = f"pod {pods[0].metadata.name}"
    if len(pods) == 1:
        return f"worker {index_of(pods[0])} ({first})"
    return f"{len(pods)} of {nodes} workers (first: {first})"


def of_pod(
    pod: Pod, claims: tuple[PersistentVolumeClaim, ...], warnings: tuple[CoreEvent, ...]
) -> Reason | None:
    """Why a pod does not start, where something is known to be wrong; `claims` are what it mounts.

    A mount that failed is old news once the sandbox is there (condition PodReadyToStartContainers).
    """
    conditions = {c.type: c for c in pod.status.conditions}
    placed = conditions.get("PodScheduled")
    if placed is not None and placed.status == "False":
        return _not_scheduled(placed.reason, placed.message, claims, warnings)
    if not pod.spec.node_name:
        return next((why for claim in claims if (why := hopeless(claim, warnings))), None)
    for container in pod.status.init_container_statuses + pod.status.container_statuses:
        waiting = container.state.waiting
        if waiting is None or waiting.reason in STARTING:
            continue
        reason = "ImagePullFailed" if waiting.reason in IMAGE_REASONS else waiting.reason
        said = _BACK_OFF.sub("", waiting.message) or waiting.reason
        return Reason(reason, f"container {container.name}: {said}")
    sandbox = conditions.get("PodReadyToStartContainers")
    failed = _last(warnings, pod.metadata.uid, MOUNT_EVENTS)
    if failed is None or (sandbox is not None and sandbox.status == "True"):
        return None
    advice = "; a ReadWriteOnce claim can be mounted on one node only: use ReadWriteMany"
    return Reason("VolumeNotMounted", failed.message + advice * ("Multi-Attach" in failed.message))


def _not_scheduled(
    reason: str,
    message: str,
    claims: tuple[PersistentVolumeClaim, ...],
    warnings: tuple[CoreEvent, ...],
) -> Reason:
    if _UNBOUND in message:
        return _claims_pending(claims, warnings)
    missing = _NO_CLAIM.search(message)
    if missing is not None:
        return Reason(
            "ClaimNotFound",
            f"there is no claim {missing['name']}; create it, or mend the claimName that names it",
        )
    return Reason(reason or "Unschedulable", summary(message))


def _claims_pending(
    claims: tuple[PersistentVolumeClaim, ...], warnings: tuple[CoreEvent, ...]
) -> Reason:
    """What the claims of a pod wait for, where the scheduler found one that is not bound."""
    pending = [claim for claim in claims if claim.status.phase == "Pending"]
    told = [hopeless(claim, warnings) or _binding(claim) for claim in pending]
    foreign = Reason(
        "ClaimPending", "a claim that it mounts is not bound yet; see: kubectl get pvc"
    )
    return told[0] if told else foreign


def _binding(claim: PersistentVolumeClaim) -> Reason:
    return Reason(
        "ClaimPending",
        f"{_name(claim)} is not bound yet; see: kubectl describe pvc {claim.metadata.name}",
    )


def hopeless(claim: PersistentVolumeClaim, warnings: tuple[CoreEvent, ...]) -> Reason | None:
    """Why it will not be bound as things stand; one that waits for its first pod will be.

    The API server fills the default class in, so a claim without one shows that none is.
    """
    if claim.status.phase != "Pending":
        return None
    failed = _last(warnings, claim.metadata.uid, PROVISIONING_EVENTS)
    if failed is not None:
        return Reason("ProvisioningFailed", f"{_name(claim)}: {failed.message}")
    if claim.spec.storage_class_name is None:
        text = f"{_name(claim)}: the cluster has no default class either; set storageClassName"
        return Reason("NoStorageClass", text)
    return None


def _name(claim: PersistentVolumeClaim) -> str:
    storage_class = claim.spec.storage_class_name
    kind = f"of storage class {storage_class}" if storage_class else "without a storage class"
    return f"claim {claim.metadata.name} {kind} with {', '.join(claim.spec.access_modes)}"


def refusal(message: str) -> Reason:
    """The API server's refusal of a pod or another object, by whose word it is."""
    text = _REFUSED_POD.sub("", message)
    quota = _QUOTA.search(text)
    if quota is not None:
        return Reason(
            "QuotaExceeded",
            f"ResourceQuota {quota['name']} is used up: requested {quota['requested']};"
            f" used {quota['used']}; limited to {quota['limited']}",
        )
    if 'violates PodSecurity "restricted' in text:
        text += "; podSecurity: restricted in the TorchrunQueue makes workers that keep to it"
    if "violates PodSecurity" in text:
        return Reason("PodSecurity", text)
    return Reason("PodsRefused", text)


def _last(warnings: tuple[CoreEvent, ...], uid: str, reasons: frozenset[str]) -> CoreEvent | None:
    """The last event regarding this object, of these reasons; `warnings` are in order of time."""
    found = (w for w in reversed(warnings) if w.involved_object.uid == uid and w.reason in reasons)
    return next(found, None)
