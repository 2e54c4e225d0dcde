"""Objects that each environment has, as far as `doctor` looks at them, and the queue of its guide.

Names of provisioners, labels and taints are those of the providers' documentation. No object comes
from a real cluster.
"""

from collections.abc import Mapping
from typing import NamedTuple

from torchrun_api.json import JsonObject, JsonValue

GPU = "nvidia.com/gpu"
DEFAULT_CLASS = {"storageclass.kubernetes.io/is-default-class": "true"}
SKU: JsonObject = {"key": "sku", "value": "gpu", "effect": "NoSchedule"}


class PlayedEnvironment(NamedTuple):
    """Objects of the whole cluster, a queue that fits, and what doctor must say."""

    title: str
    sign: str
    objects: tuple[JsonObject, ...]
    queue: JsonObject
    shared: str  # the class with ReadWriteMany
    network: tuple[str, str]  # verdict, and words of the finding
    autoscaler: str = "None found"


def node(
    name: str, provider: str, labels: Mapping[str, str], *taints: JsonValue, gpus: int = 8
) -> JsonObject:
    """A Ready node of the provider."""
    resources: JsonObject = {"cpu": "96", "memory": "1Ti", "pods": "110"}
    if gpus:
        resources[GPU] = str(gpus)
    marks: JsonObject = {**labels}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": marks},
        "spec": {"providerID": provider, "taints": list(taints)},
        "status": {
            "allocatable": resources,
            "capacity": resources,
            "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}],
        },
    }


def storage_class(name: str, provisioner: str, *, default: bool = False) -> JsonObject:
    """A StorageClass."""
    annotations: JsonObject = {**DEFAULT_CLASS} if default else {}
    return {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": name, "annotations": annotations},
        "provisioner": provisioner,
    }


def daemon_set(name: str, *arguments: str) -> JsonObject:
    """A DaemonSet in kube-system with a container of these arguments."""
    labels: JsonObject = {"app": name}
    words: list[JsonValue] = [*arguments]
    containers: list[JsonValue] = [{"name": "agent", "image": "example.com/agent", "args": words}]
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": name, "namespace": "kube-system"},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": {"containers": containers}},
        },
    }


def kind_of(group: str, kind: str) -> JsonObject:
    """A cluster-scoped CRD, so that the API server serves its group."""
    plural = kind.lower() + "s"
    schema: JsonObject = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "scope": "Cluster",
            "names": {"kind": kind, "plural": plural},
            "versions": [
                {
                    "name": "v1",
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": schema},
                }
            ],
        },
    }


AUTOSCALER_STATUS: JsonObject = {
    "apiVersion": "v1",
    "kind": "ConfigMap",
    "metadata": {"name": "cluster-autoscaler-status", "namespace": "kube-system"},
    "data": {"status": "autoscalerStatus: Running"},
}


def queue(shared: str, *tolerations: JsonValue, isolate: bool = False) -> JsonObject:
    """The spec of a queue with GPUs, and checkpoints in this class."""
    return {
        "image": "example.com/torch",
        "nodeResources": {"gpus": 8, "cpus": 90, "memory": "900Gi"},
        "storage": {"checkpoints": {"size": "100Gi", "storageClassName": shared}},
        "scheduling": {"tolerations": list(tolerations)},
        "networking": {"isolate": isolate},
    }


GKE = PlayedEnvironment(
    "GKE",
    "cloud.google.com/gke-nodepool",
    (
        node("gke", "gce://project/zone/gke",
             {"cloud.google.com/gke-nodepool": "gpus",
              "cloud.google.com/gke-accelerator": "nvidia-h100-80gb"},
             {"key": GPU, "value": "present", "effect": "NoSchedule"}),
        storage_class("standard-rwo", "pd.csi.storage.gke.io", default=True),
        storage_class("standard-rwx", "filestore.csi.storage.gke.io"),
        daemon_set("anetd"),
        AUTOSCALER_STATUS,
    ),
    queue("standard-rwx", isolate=True),
    "standard-rwx",
    ("ok", "Cilium enforces"),
    "cluster-autoscaler adds nodes",
)  # fmt: skip
EKS = PlayedEnvironment(
    "EKS",
    "eks.amazonaws.com/nodegroup",
    (
        node("eks", "aws:///eu-central-1a/i-0", {"eks.amazonaws.com/nodegroup": "gpus"}),
        storage_class("gp3", "ebs.csi.aws.com", default=True),
        storage_class("efs-sc", "efs.csi.aws.com"),
        daemon_set("aws-node", "--enable-network-policy=false"),
        kind_of("karpenter.sh", "NodePool"),
    ),
    queue("efs-sc", isolate=True),
    "efs-sc",
    ("warn", "Amazon VPC CNI does not enforce"),
    "Karpenter adds nodes",
)
AKS = PlayedEnvironment(
    "AKS",
    "kubernetes.azure.com/cluster",
    (
        node("aks", "azure:///subscriptions/0/x",
             {"kubernetes.azure.com/cluster": "MC_x", "kubernetes.azure.com/accelerator": "nvidia"},
             SKU),
        storage_class("default", "disk.csi.azure.com", default=True),
        storage_class("azurefile-csi-premium", "file.csi.azure.com"),
        daemon_set("azure-npm"),
    ),
    queue("azurefile-csi-premium", {"key": "sku", "operator": "Exists", "effect": "NoSchedule"}),
    "azurefile-csi-premium",
    ("ok", "Azure Network Policy Manager enforces"),
)  # fmt: skip
OPENSHIFT = PlayedEnvironment(
    "OpenShift",
    "config.openshift.io",
    (
        kind_of("config.openshift.io", "ClusterVersion"),
        kind_of("security.openshift.io", "SecurityContextConstraint"),
        kind_of("k8s.ovn.org", "EgressIP"),
        kind_of("autoscaling.openshift.io", "ClusterAutoscaler"),
        node("ocp", "vsphere://0", {"nvidia.com/gpu.present": "true"}),
        storage_class("ocs-storagecluster-ceph-rbd", "openshift-storage.rbd.csi.ceph.com",
                      default=True),
        storage_class("ocs-storagecluster-cephfs", "openshift-storage.cephfs.csi.ceph.com"),
    ),
    queue("ocs-storagecluster-cephfs", isolate=True),
    "ocs-storagecluster-cephfs",
    ("ok", "OVN-Kubernetes enforces"),
)  # fmt: skip
K3S = PlayedEnvironment(
    "k3s",
    "k3s://",
    (
        node("k3s", "k3s://k3s", {}),
        storage_class("local-path", "rancher.io/local-path", default=True),
        storage_class("longhorn", "driver.longhorn.io"),
    ),
    queue("longhorn", isolate=True),
    "longhorn",
    ("note", "--disable-network-policy"),
)
ON_PREMISES = PlayedEnvironment(
    "On-premises",
    "no sign of a managed Kubernetes",
    (
        node("metal", "", {}),
        storage_class("nfs", "nfs.csi.k8s.io", default=True),
        kind_of("crd.projectcalico.org", "FelixConfiguration"),
    ),
    queue("nfs", isolate=True),
    "nfs",
    ("ok", "Calico enforces"),
)
PLAYED = (GKE, EKS, AKS, OPENSHIFT, K3S, ON_PREMISES)
