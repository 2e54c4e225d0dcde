"""Storage classes by their provisioners, and the classes of queues."""

import pytest

from kubectl_torchrun.cluster.client import ApiError
from kubectl_torchrun.doctor.environment import GKE
from kubectl_torchrun.doctor.storage import check_storage, sharing_of
from torchrun_api.json import JsonObject, JsonValue

from .played import FORBIDDEN, items, named, only, play, queue, verdicts

DEFAULT = {"storageclass.kubernetes.io/is-default-class": "true"}
LOCAL = named("local-path", provisioner="rancher.io/local-path", annotations={**DEFAULT})
SHARED = named("shared", provisioner="nfs.csi.k8s.io")


@pytest.mark.parametrize(
    ("provisioner", "sharing"),
    [
        ("efs.csi.aws.com", "yes"),
        ("ebs.csi.aws.com", "no"),
        ("filestore.csi.storage.gke.io", "yes"),
        ("pd.csi.storage.gke.io", "no"),
        ("file.csi.azure.com", "yes"),
        ("disk.csi.azure.com", "no"),
        ("openshift-storage.cephfs.csi.ceph.com", "yes"),
        ("openshift-storage.rbd.csi.ceph.com", "no"),
        ("rook-ceph.cephfs.csi.ceph.com", "yes"),
        ("driver.longhorn.io", "yes"),
        ("nfs.csi.k8s.io", "yes"),
        ("cluster.local/nfs-subdir-external-provisioner", "yes"),
        ("rancher.io/local-path", "no"),
        ("csi.trident.netapp.io", "depends"),
        ("example.com/disk", "unknown"),
        ("notebs.csi.aws.com", "unknown"),
    ],
)
def test_a_provisioner_supports_read_write_many(provisioner: str, sharing: str) -> None:
    assert sharing_of(provisioner) == sharing


def test_a_healthy_cluster_has_a_default_and_a_shared_class() -> None:
    checkpoints: JsonValue = {"storageClassName": "shared"}
    findings = check_storage(
        play(
            storageclasses=items(LOCAL, SHARED),
            queues=items(queue(storage={"checkpoints": checkpoints})),
        )
    )
    assert verdicts(findings) == ["ok", "ok"]
    assert "ReadWriteMany: shared" in findings[1].text


def test_no_shared_class_names_those_that_are_not_known() -> None:
    others = [named("own", provisioner="example.com/disk"),
              named("ontap", provisioner="csi.trident.netapp.io")]  # fmt: skip
    snapshot = play(storageclasses=items(LOCAL, *others), version={"gitVersion": "v1.34.1-gke.1"})
    found = check_storage(snapshot)[1]
    assert found.verdict == "warn"
    assert "its backend decides for ontap" in found.text
    assert "not known: own" in found.text
    assert found.fix == GKE.storage


@pytest.mark.parametrize(
    ("checkpoints", "warned"),
    [
        ({}, False),
        ({"sizePerGPU": "1Gi"}, True),
        ({"storageClassName": "local-path"}, True),
        ({"storageClassName": "shared"}, False),
        ({"sizePerGPU": "1Gi", "accessMode": "ReadWriteMany"}, True),
        ({"sizePerGPU": "1Gi", "accessMode": "ReadWriteOnce"}, False),
        ({"sizePerGPU": "1Gi", "enabled": False}, False),
        ({"claimName": "mine"}, False),
        ({"hostPath": "/mnt"}, False),
    ],
)
def test_checkpoints_of_several_nodes_need_a_shared_class(
    checkpoints: JsonObject, warned: bool
) -> None:
    storage: JsonObject = {"checkpoints": checkpoints}
    findings = check_storage(
        play(storageclasses=items(LOCAL, SHARED), queues=items(queue(storage=storage)))
    )
    assert (verdicts(findings) == ["ok", "ok", "warn"]) is warned
    if warned:
        assert "local-path (rancher.io/local-path), which does not support" in findings[2].text


@pytest.mark.parametrize("use", ["workspace", "checkpoints"])
def test_a_class_that_does_not_exist_is_named(use: str) -> None:
    storage: JsonObject = {use: {"storageClassName": "fast"}}
    snapshot = play(storageclasses=items(LOCAL, SHARED), queues=items(queue(storage=storage)))
    found = only(check_storage(snapshot), "warn")
    assert f"storage class fast for its {use}, which does not exist" in found.text
    assert "local-path, shared" in found.fix


def test_a_cluster_without_classes_fails_and_a_forbidden_list_is_not_a_failure() -> None:
    assert verdicts(check_storage(play())) == ["fail"]
    with pytest.raises(ApiError):
        check_storage(play(storageclasses=FORBIDDEN))
