"""Checks of the PVCs of a job: terminating, lost, deleted, or mountable on one machine only."""

from torchrun_api import names
from torchrun_api.kinds.core import PersistentVolumeClaim, Pod
from torchrun_controller.reconcile.model.conditions import Reason
from torchrun_controller.reconcile.model.observed import ObservedWorkspace
from torchrun_controller.reconcile.model.plan import Apply, Delete
from torchrun_controller.reconcile.pods.lifecycle import delete_pod
from torchrun_controller.reconcile.spec.resolve import VolumeSource

SHARED = frozenset({"ReadWriteMany", "ReadOnlyMany"})


def find_claim(
    claims: tuple[PersistentVolumeClaim, ...], name: str
) -> PersistentVolumeClaim | None:
    """Return the PVC of this name, which may be terminating."""
    return next((claim for claim in claims if claim.metadata.name == name), None)


def find_uid(claims: tuple[PersistentVolumeClaim, ...], name: str) -> str:
    """Return the UID of the PVC of this name; "" if there is none."""
    claim = find_claim(claims, name)
    return "" if claim is None else claim.metadata.uid


def is_shared(source: VolumeSource, claims: tuple[PersistentVolumeClaim, ...]) -> bool:
    """Whether several machines can mount the PVC at a time. One that exists keeps its modes."""
    return not SHARED.isdisjoint(_find_modes(source, claims))


def is_for_one_pod(source: VolumeSource, claims: tuple[PersistentVolumeClaim, ...]) -> bool:
    """Whether only one pod can mount the PVC at a time."""
    return _find_modes(source, claims) == ("ReadWriteOncePod",)


def _find_modes(source: VolumeSource, claims: tuple[PersistentVolumeClaim, ...]) -> tuple[str, ...]:
    claim = find_claim(claims, source.name)
    return (source.access_mode,) if claim is None else claim.spec.access_modes


def is_of_former_claim(pod: Pod, claim: PersistentVolumeClaim | None) -> bool:
    """Whether what the pod wrote was deleted with a former PVC of this name.

    A pod that was created with its PVC does not record the UID: the PVC records the pod. Their
    times say nothing, because they can come from two API servers.
    """
    if claim is None or pod.metadata.annotations.delivery == "ephemeral":
        return False
    if uid := pod.metadata.annotations.claim_uid:
        return uid != claim.metadata.uid
    return pod.metadata.name != claim.metadata.annotations.first_pod


def usable_base(workspace: ObservedWorkspace) -> str:
    """Return the job whose workspace the first sync pod can mount in addition; "" for none.

    Its PVC must allow several machines, or no pod may use it.
    """
    base = workspace.base
    if base is None or base.claim.status.phase != "Bound":
        return ""
    meta = base.claim.metadata
    if meta.terminating or meta.labels.component != names.WORKSPACE:
        return ""
    shared_modes = SHARED.intersection(base.claim.spec.access_modes)
    return "" if base.in_use and not shared_modes else meta.labels.torchrun_job


def release_terminating(workspace: ObservedWorkspace, name: str) -> tuple[Delete, ...]:
    """Delete all sync and setup pods if their PVC is being deleted.

    Kubernetes keeps a PVC while a pod exists that mounts it, also one that has finished.
    """
    if check_terminating(workspace.claims, name) is None:
        return ()
    pods = (*workspace.sync_pods, *workspace.setup_pods)
    return tuple(delete_pod(pod) for pod in pods if not pod.metadata.terminating)


def check_terminating(claims: tuple[PersistentVolumeClaim, ...], name: str) -> Reason | None:
    """Return a reason if the PVC is being deleted: until it is gone, no new pod can mount it."""
    claim = find_claim(claims, name)
    if claim is None or not claim.metadata.terminating:
        return None
    return Reason(
        "ClaimTerminating",
        f"PVC {name} is being deleted. A new one is created when it is gone. Kubernetes keeps it"
        f" while a pod mounts it. To find these pods, see Used By in: kubectl describe pvc {name}",
    )


def check_mounted(
    claims: tuple[PersistentVolumeClaim, ...], claim_applies: tuple[Apply, ...] = ()
) -> Reason | None:
    """Return what is wrong with PVCs that a running gang has mounted.

    `claim_applies` are the PVCs that are created again now.
    """
    for claim in claims:
        name = claim.metadata.name
        if claim.metadata.terminating:
            return Reason(
                "ClaimTerminating",
                f"PVC {name} is being deleted. It and its data are removed when the current pods"
                " end. Copy the data that you need before then.",
            )
        if claim.status.phase == "Lost":
            return Reason(
                "ClaimLost",
                f"PVC {name} has lost its volume, and no new pod can mount it. To get a new, empty"
                f" PVC for the next gang, run: kubectl delete pvc {name}",
            )
    for apply in claim_applies:
        return Reason(
            "ClaimDeleted",
            f"PVC {apply.name} was deleted while the gang was running. Its data is lost. Creating"
            " an empty PVC.",
        )
    return None


def check_access_modes(claims: tuple[PersistentVolumeClaim, ...], nodes: int) -> Reason | None:
    """Return a reason if a PVC can be mounted on one machine only, and the gang has several."""
    unshared_claims = [
        c for c in claims if nodes > 1 and not SHARED.intersection(c.spec.access_modes)
    ]
    if not unshared_claims:
        return None
    modes = ", ".join(
        f"{c.metadata.name} ({', '.join(c.spec.access_modes)})" for c in unshared_claims
    )
    return Reason(
        "ReadWriteOnce",
        f"The job has {nodes} nodes, but these PVCs can be mounted on one machine only: {modes}."
        " Pods on other machines cannot start. Use accessMode ReadWriteMany and a storage class"
        " that supports it.",
    )
