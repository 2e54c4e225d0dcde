"""A sync pod that reuses the files of another job's workspace PVC."""

from typing import Any

import pytest
from msgspec.structs import replace

from torchrun_api import names
from torchrun_api.kinds.core import ClaimSpec, ClaimStatus, PersistentVolumeClaim, Pod
from torchrun_api.kinds.meta import ChildLabels, ChildMeta
from torchrun_api.kinds.resources import CLAIMS, PODS
from unit.reconcile.workspace.reloading import annotate, body, syncing, variables
from world import START, ZIP, World, make_job, make_queue


def lent(mode: str = "ReadWriteMany", phase: Any = "Bound", **meta: Any) -> PersistentVolumeClaim:
    labels = ChildLabels(torchrun_job="before", component="workspace")
    named = ChildMeta(name="before-workspace", namespace="ml", labels=labels)
    return PersistentVolumeClaim(
        metadata=replace(named, **meta),
        spec=ClaimSpec(access_modes=(mode,)),
        status=ClaimStatus(phase=phase),
    )


def with_base(base: PersistentVolumeClaim | None, *, in_use: bool = False) -> World:
    world = World(make_job(numNodes=1, volumes=ZIP), make_queue())
    annotate(world, workspace_base="before")
    if base is not None:
        world.objects[CLAIMS.plural, base.metadata.name] = base
    if in_use:
        labels = ChildLabels(torchrun_job="before", component=names.WORKER)
        meta = ChildMeta(name="before-0-abcde", namespace="ml", labels=labels)
        world.objects[PODS.plural, meta.name] = Pod(metadata=meta)
    world.settle()
    return world


@pytest.mark.parametrize(
    ("base", "in_use", "used"),
    [
        (lent(), False, True),
        (lent(), True, True),
        (lent("ReadWriteOnce"), False, True),
        (lent("ReadWriteOnce"), True, False),
        (lent(phase="Pending"), False, False),
        (None, False, False),
    ],
)
def test_a_base_is_mounted_if_possible(
    base: PersistentVolumeClaim | None, in_use: bool, used: bool
) -> None:
    pod = body(with_base(base, in_use=in_use), PODS, "train-sync-0")["spec"]
    claims = [v["persistentVolumeClaim"] for v in pod["volumes"] if "persistentVolumeClaim" in v]
    assert ({"claimName": "before-workspace", "readOnly": True} in claims) == used
    assert ("TORCHRUN_SYNC_BASE" in variables(pod)) == used


def test_terminating_and_other_claims_are_no_base() -> None:
    checkpoints = ChildLabels(torchrun_job="before", component="checkpoints")
    for base in (lent(deletion_timestamp=START), lent(labels=checkpoints)):
        pod = body(with_base(base), PODS, "train-sync-0")["spec"]
        assert "TORCHRUN_SYNC_BASE" not in variables(pod)


def test_a_pod_that_cannot_mount_its_base_is_replaced_without_it() -> None:
    world = with_base(lent())
    assert world.settle().requeue_after == 20
    world.pass_time(seconds=20)
    world.step()
    assert (world.phase, world.job.status.reason) == ("Syncing", "Replacing")
    assert world.job.status.message == (
        "Pod train-sync-0 has not started with the PVC of job before within 20 s. Replacing it by a"
        " pod without that PVC."
    )
    world.settle()
    assert syncing(world) == ["train-sync-0"]
    assert "TORCHRUN_SYNC_BASE" not in variables(body(world, PODS, "train-sync-0")["spec"])
    assert world.settle().requeue_after is None
