"""The node of a workspace PVC that only one node can mount: the pods that use it run there.

The scheduler does not know where such a PVC is mounted. A pod on another node does not start as
long as a pod on the first one runs.
"""

from datetime import datetime

from torchrun_api.core import Pod
from torchrun_controller.reconcile.model.observed import Observed
from torchrun_controller.reconcile.pods import nodes
from torchrun_controller.reconcile.pods.lifecycle import alive
from torchrun_controller.reconcile.spec.resolve import VolumeSource
from torchrun_controller.reconcile.workspace import claims, delivery


def find_nodes(
    observed: Observed, source: VolumeSource, store: str, now: datetime
) -> tuple[str, ...] | None:
    """Return the nodes where a pod with this store has to run; None if it may run on any node.

    A serve pod runs where others serve from the PVC. A sync pod follows the workers and the setup
    pods, so there is no node as long as none of them has one. Pods that are being deleted, or whose
    node is lost, soon have the PVC mounted no more.
    """
    workspace, cluster_nodes = observed.workspace, observed.cluster.nodes
    claim = claims.find_claim(workspace.claims, source.name)
    if store == "ephemeral" or claim is None or claims.is_shared(source, workspace.claims):
        return None
    serve_pods = tuple(pod for pod in workspace.sync_pods if delivery.is_serve_pod(pod))
    users = serve_pods if store else (*observed.gang.workers, *workspace.setup_pods)
    return tuple(
        pod.spec.node_name
        for pod in users
        if pod.spec.node_name and alive(pod) and not pod.metadata.terminating
        if nodes.find_loss(cluster_nodes, pod, now) is None
    )


def is_misplaced(pod: Pod, claim_nodes: tuple[str, ...] | None) -> bool:
    """Whether the pod runs, or has to run, on another node than the pods that mount the PVC."""
    claim_nodes = claim_nodes or ()
    if pod.spec.node_name:
        return bool(claim_nodes) and alive(pod) and pod.spec.node_name not in claim_nodes
    node = pod.metadata.annotations.claim_node
    return bool(node) and node not in claim_nodes
