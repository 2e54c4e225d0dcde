"""Which Kubernetes it is, and what to do there about storage, GPUs and network policies."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from kubectl_torchrun.doctor.findings import Finding, object_of, text_at
from kubectl_torchrun.doctor.snapshot import ClusterSnapshot

_PAGE = "docs/environments.md"


class ClusterEnvironment(NamedTuple):
    """A provider or a distribution, with its own way to get what a job needs."""

    title: str  # also the heading of its section in docs/environments.md
    storage: str
    gpus: str
    policies: str


ON_PREMISES = ClusterEnvironment(
    "On-premises",
    "Install a provisioner with ReadWriteMany, such as csi-driver-nfs, CephFS or Longhorn",
    "Install the driver and a device plugin, for example with the NVIDIA GPU Operator",
    "Use a network plugin that enforces them, such as Calico or Cilium",
)
GKE = ClusterEnvironment(
    "GKE",
    "Enable the Filestore CSI driver, and use its class standard-rwx or one of your own",
    "Let the node pool install the driver (gpu-driver-version), which starts the device plugin",
    "Enable Dataplane V2 or network policy enforcement for the cluster",
)
EKS = ClusterEnvironment(
    "EKS",
    "Install the add-on aws-efs-csi-driver, and create a class with the id of a file system",
    "Install the NVIDIA device plugin or the GPU Operator; Bottlerocket and Auto Mode have it",
    "Set enableNetworkPolicy in the add-on vpc-cni",
)
AKS = ClusterEnvironment(
    "AKS",
    "Use a class of file.csi.azure.com with protocol: nfs for storage of several nodes",
    "Install the NVIDIA device plugin or the GPU Operator, unless AKS manages the GPU node pool",
    "Create the cluster with a network policy engine (Cilium, Calico or Azure)",
)
OPENSHIFT = ClusterEnvironment(
    "OpenShift",
    "Install OpenShift Data Foundation; its class with CephFS supports ReadWriteMany",
    "Install the Node Feature Discovery and NVIDIA GPU Operators from OperatorHub",
    "OVN-Kubernetes, the default, enforces them",
)
K3S = ClusterEnvironment(
    "k3s",
    "Install Longhorn or csi-driver-nfs: local-path is on one node",
    "Install the NVIDIA container toolkit and the device plugin, and set runtimeClassName: nvidia",
    "Start the servers without --disable-network-policy",
)
KIND = ClusterEnvironment(
    "kind",
    "Install an NFS provisioner if jobs of several nodes need checkpoints",
    "kind has no GPUs: use a queue without GPUs",
    "Use kind 0.24 or newer, or install Calico",
)
ENVIRONMENTS = (GKE, EKS, AKS, OPENSHIFT, K3S, KIND, ON_PREMISES)

_VERSIONS: Mapping[str, ClusterEnvironment] = {r"\+k3s": K3S, r"-gke\.": GKE, r"-eks-": EKS}
_NODE_LABELS: Mapping[str, ClusterEnvironment] = {
    "kubernetes.azure.com/cluster": AKS,
    "kubernetes.azure.com/agentpool": AKS,
    "cloud.google.com/gke-nodepool": GKE,
    "eks.amazonaws.com/nodegroup": EKS,
}
_PROVIDERS: Mapping[str, ClusterEnvironment] = {"kind": KIND, "k3s": K3S}


def detect_environment(snapshot: ClusterSnapshot) -> tuple[ClusterEnvironment | None, str]:
    """The environment, and how it was recognized; None if nothing readable says so."""
    if not snapshot.is_unreadable("groups") and "config.openshift.io" in snapshot.groups():
        return OPENSHIFT, "by the API group config.openshift.io"
    version = text_at(snapshot.read("version"), "gitVersion")
    for pattern, environment in _VERSIONS.items():
        if re.search(pattern, version):
            return environment, f"by the version {version}"
    if snapshot.is_unreadable("nodes"):
        return None, ""
    for node in snapshot.items("nodes"):
        labels = object_of(node, "metadata", "labels")
        for label, environment in _NODE_LABELS.items():
            if label in labels:
                return environment, f"by the node label {label}"
        provider = text_at(node, "spec", "providerID").partition("://")[0]
        if provider in _PROVIDERS:
            return _PROVIDERS[provider], f"by the providerID {provider}:// of a node"
    return ON_PREMISES, "no sign of a managed Kubernetes"


def environment_of(snapshot: ClusterSnapshot) -> ClusterEnvironment:
    """The environment whose advice is given; on-premises if it is not known."""
    return detect_environment(snapshot)[0] or ON_PREMISES


def check_environment(snapshot: ClusterSnapshot) -> list[Finding]:
    """The environment, and where its settings are described."""
    environment, sign = detect_environment(snapshot)
    if environment is None:
        snapshot.read("nodes")  # raises why the nodes cannot be read
        environment = ON_PREMISES
    fix = f"For the settings of its queues, see {environment.title} in {_PAGE}"
    return [Finding("note", "environment", f"{environment.title}, {sign}", fix)]
