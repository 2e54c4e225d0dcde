"""The claims of a job as they are: found by name, being deleted, lost, mountable on one node."""

from torchrun_api.core import PersistentVolumeClaim
from torchrun_controller.reconcile.model.conditions import Reason
from torchrun_controller.reconcile.model.plan import Apply

SHARED = frozenset({"ReadWriteMany", "ReadOnlyMany"})


def named(claims: tuple[PersistentVolumeClaim, ...], name: str) -> PersistentVolumeClaim | None:
    """The claim of this name, which may be terminating."""
    return next((claim for claim in claims if claim.metadata.name == name), None)


def terminating(claims: tuple[PersistentVolumeClaim, ...], name: str) -> Reason | None:
    """That the claim is being deleted: no pod can mount it any more, and no other has its name."""
    found = named(claims, name)
    if found is None or not found.metadata.terminating:
        return None
    return Reason(
        "ClaimTerminating",
        f"claim {name} is being deleted, and another is made once it is gone. Kubernetes keeps it"
        f" while a pod mounts it; see Used By in: kubectl describe pvc {name}",
    )


def trouble(
    claims: tuple[PersistentVolumeClaim, ...], missing: tuple[Apply, ...] = ()
) -> Reason | None:
    """What is wrong with claims of the job beside a gang that has mounted them.

    `missing` are those that are made again now.
    """
    for claim in claims:
        name = claim.metadata.name
        if claim.metadata.terminating:
            return Reason(
                "ClaimTerminating",
                f"claim {name} is being deleted: it and what is on it are gone once the present"
                " workers end. Copy now what must be kept",
            )
        if claim.status.phase == "Lost":
            return Reason(
                "ClaimLost",
                f"claim {name} has lost its volume, and no new worker can mount it. Delete it"
                f" (kubectl delete pvc {name}), and the next gang has another, which is empty",
            )
    for apply in missing:
        return Reason(
            "ClaimDeleted",
            f"claim {apply.name} was deleted beside the gang; an empty one is made."
            " What was on it is gone",
        )
    return None


def unshared(claims: tuple[PersistentVolumeClaim, ...], nodes: int) -> Reason | None:
    """That a claim can be mounted on one node only, where workers on several shall mount it."""
    bad = [c for c in claims if nodes > 1 and not SHARED.intersection(c.spec.access_modes)]
    if not bad:
        return None
    told = ", ".join(f"{c.metadata.name} ({', '.join(c.spec.access_modes)})" for c in bad)
    return Reason(
        "ReadWriteOnce",
        f"{told}: can be mounted on one node only, and the job has {nodes}; workers on other nodes"
        " will wait for ever. Use accessMode ReadWriteMany, and a storage class that offers it",
    )
