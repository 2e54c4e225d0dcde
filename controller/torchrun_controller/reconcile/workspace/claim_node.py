"""The node of a workspace PVC that only one node can mount: the pods that use it run there.

The scheduler does not know where such a PVC is mounted. A pod on another node does not start as
long as a pod on the first one runs.
"""

from datetime import datetime

from torchrun_api.core import Pod
from torchrun_controller.reconcile.model.observed import Observed
from torchrun_controller.reconcile.pods import nodes
from torchrun_controller.reconcile.pods.lifecycle import alive
from torchrun_controller.reconcile.workspace import delivery


def find_nodes(observed: Observed, store: str, now: datetime) -> tuple[str, ...]:
    """Return the nodes on which pods mount the PVC, for a pod with this store; none for any node.

    A pod that is being deleted, or whose node is lost, soon has it mounted no more.
    """
    if store != "claim":
        return ()
    users = (pod for pod in observed.workspace.sync_pods if delivery.is_serve_pod(pod))
    cluster_nodes = observed.cluster.nodes
    return tuple(
        pod.spec.node_name
        for pod in users
        if pod.spec.node_name and alive(pod) and not pod.metadata.terminating
        if nodes.find_loss(cluster_nodes, pod, now) is None
    )


def waits_in_vain(pod: Pod, claim_nodes: tuple[str, ...]) -> bool:
    """Whether the pod has to run on a node where no pod mounts the PVC any more."""
    node = pod.metadata.annotations.claim_node
    return bool(node) and not pod.spec.node_name and node not in claim_nodes
