"""Storage classes: which provisioners support ReadWriteMany, and which classes the queues use."""

from collections.abc import Iterator, Mapping
from typing import Literal

from kubectl_torchrun.doctor.environment import environment_of
from kubectl_torchrun.doctor.findings import Finding, field_at, name_of, object_of, text_at
from kubectl_torchrun.doctor.snapshot import ClusterSnapshot
from torchrun_api.json import JsonObject

Sharing = Literal["yes", "no", "depends", "unknown"]
_DEFAULT = "storageclass.kubernetes.io/is-default-class"
# From the documentation of each driver: volumes with a file system. Block volumes do not count.
# A name matches the provisioner itself, and one with a prefix that an operator adds, as in
# openshift-storage.cephfs.csi.ceph.com.
_SHARING: Mapping[str, Sharing] = {
    "efs.csi.aws.com": "yes",
    "fsx.csi.aws.com": "yes",
    "fsx.openzfs.csi.aws.com": "yes",
    "ebs.csi.aws.com": "no",
    "ebs.csi.eks.amazonaws.com": "no",
    "kubernetes.io/aws-ebs": "no",
    "filestore.csi.storage.gke.io": "yes",
    "lustre.csi.storage.gke.io": "yes",
    "pd.csi.storage.gke.io": "no",
    "kubernetes.io/gce-pd": "no",
    "file.csi.azure.com": "yes",
    "kubernetes.io/azure-file": "yes",
    "blob.csi.azure.com": "yes",
    "azurelustre.csi.azure.com": "yes",
    "disk.csi.azure.com": "no",
    "kubernetes.io/azure-disk": "no",
    "cephfs.csi.ceph.com": "yes",
    "rbd.csi.ceph.com": "no",
    "driver.longhorn.io": "yes",
    "nfs.csi.k8s.io": "yes",
    "smb.csi.k8s.io": "yes",
    "nfs.manila.csi.openstack.org": "yes",
    "cephfs.manila.csi.openstack.org": "yes",
    "cinder.csi.openstack.org": "no",
    "csi.juicefs.com": "yes",
    "csi.weka.io": "yes",
    "csi.vastdata.com": "yes",
    "beegfs.csi.netapp.com": "yes",
    "csi.quobyte.com": "yes",
    "spectrumscale.csi.ibm.com": "yes",
    "rancher.io/local-path": "no",
    "kubernetes.io/no-provisioner": "no",
    "topolvm.io": "no",
    "openebs.io/local": "no",
    "local.csi.openebs.io": "no",
    "dobs.csi.digitalocean.com": "no",
    "csi.hetzner.cloud": "no",
    # The backend or a parameter of the class decides.
    "csi.trident.netapp.io": "depends",
    "pxd.portworx.com": "depends",
    "kubernetes.io/portworx-volume": "depends",
    "csi.vsphere.vmware.com": "depends",
}
# Provisioners whose names users choose.
_WORDS: Mapping[str, Sharing] = {"nfs": "yes", "cephfs": "yes", "lustre": "yes", "gluster": "yes"}


def sharing_of(provisioner: str) -> Sharing:
    """Whether volumes of this provisioner can be ReadWriteMany."""
    for name, sharing in _SHARING.items():
        if provisioner == name or provisioner.endswith(f".{name}"):
            return sharing
    words = (sharing for word, sharing in _WORDS.items() if word in provisioner.lower())
    return next(words, "unknown")


def check_storage(snapshot: ClusterSnapshot) -> list[Finding]:
    """Whether a class is the default, one supports ReadWriteMany, and the queues use such a one."""
    classes = {name_of(item): item for item in snapshot.items("storageclasses")}
    if not classes:
        text = "The cluster has no storage class"
        return [Finding("fail", "storage", text, environment_of(snapshot).storage)]
    default = next((name for name, item in classes.items() if _is_default(item)), "")
    listed = ", ".join(f"{name} ({text_at(c, 'provisioner')})" for name, c in classes.items())
    if default:
        first = Finding("ok", "storage", f"Default {default}; classes: {listed}")
    else:
        fix = "Set spec.storage.workspace.storageClassName in the queue"
        first = Finding("warn", "storage", f"No default class; classes: {listed}", fix)
    return [
        first,
        _check_shared(snapshot, classes),
        *_check_queues(snapshot, classes, default),
    ]


def _is_default(item: JsonObject) -> bool:
    return field_at(item, "metadata", "annotations", _DEFAULT) == "true"


def _check_shared(snapshot: ClusterSnapshot, classes: Mapping[str, JsonObject]) -> Finding:
    by_sharing: dict[Sharing, list[str]] = {}
    for name, item in classes.items():
        by_sharing.setdefault(sharing_of(text_at(item, "provisioner")), []).append(name)
    if "yes" in by_sharing:
        return Finding("ok", "shared", f"ReadWriteMany: {', '.join(by_sharing['yes'])}")
    text = "No storage class is known to support ReadWriteMany"
    for sharing, words in (("depends", "its backend decides for"), ("unknown", "not known:")):
        if sharing in by_sharing:
            text += f"; {words} {', '.join(by_sharing[sharing])}"
    text += ". Code reaches all nodes without it; checkpoints of several nodes do not"
    return Finding("warn", "shared", text, environment_of(snapshot).storage)


def _check_queues(
    snapshot: ClusterSnapshot, classes: Mapping[str, JsonObject], default: str
) -> Iterator[Finding]:
    for queue in snapshot.queues():
        name = name_of(queue)
        for use in ("workspace", "checkpoints"):
            volume = object_of(queue, "spec", "storage", use)
            chosen = text_at(volume, "storageClassName")
            if chosen and chosen not in classes:
                text = (
                    f"Queue {name} uses storage class {chosen} for its {use}, which does not exist."
                    " The PVC binds only to a volume that an administrator creates"
                )
                fix = f"Set spec.storage.{use}.storageClassName to one of: {', '.join(classes)}"
                yield Finding("warn", "storage", text, fix)
                continue
            known = classes.get(chosen or default)
            if use == "checkpoints" and known is not None and _is_for_several_nodes(volume):
                yield from _check_checkpoints(name, known)


def _is_for_several_nodes(volume: JsonObject) -> bool:
    """Whether jobs of several nodes create a PVC from this template and share it."""
    return (
        bool(volume)
        and volume.get("enabled") is not False
        and not volume.get("claimName")
        and not volume.get("hostPath")
        and volume.get("accessMode") in (None, "ReadWriteMany")
    )


def _check_checkpoints(queue: str, storage_class: JsonObject) -> Iterator[Finding]:
    provisioner = text_at(storage_class, "provisioner")
    if sharing_of(provisioner) == "no":
        text = (
            f"Queue {queue} has its checkpoints in class {name_of(storage_class)} ({provisioner}),"
            " which does not support ReadWriteMany by itself: jobs of several nodes can wait"
            " (ClaimPending)"
        )
        fix = "Set spec.storage.checkpoints.storageClassName to a class with ReadWriteMany"
        yield Finding("warn", "storage", text, fix)
