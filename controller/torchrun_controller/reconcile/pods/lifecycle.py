"""The pods of a gang: how many run, and how one is deleted."""

from torchrun_api import names
from torchrun_api.core import Pod
from torchrun_api.kinds import PODS
from torchrun_api.meta import ChildMeta
from torchrun_api.status import WorkersStatus
from torchrun_controller.reconcile.model.conditions import find_condition
from torchrun_controller.reconcile.model.plan import Delete


def count(pods: tuple[Pod, ...], nodes: int) -> WorkersStatus:
    """Workers by state; one without a pod yet counts as pending."""
    phases = [pod.status.phase for pod in pods]
    running, failed, succeeded = (
        phases.count("Running"),
        phases.count("Failed"),
        phases.count("Succeeded"),
    )
    return WorkersStatus(
        pending=max(0, nodes - running - failed - succeeded),
        ready=sum(_ready(pod) for pod in pods),
        running=running,
        failed=failed,
        succeeded=succeeded,
    )


def _ready(pod: Pod) -> bool:
    ready = find_condition(pod.status.conditions, "Ready")
    return ready is not None and ready.status == "True"


def scheduled(pods: tuple[Pod, ...]) -> int:
    """How many have a node."""
    return sum(bool(pod.spec.node_name) for pod in pods)


def index_of(pod: Pod) -> int:
    """Number of a worker in its gang: its completion index, of one beside a head one more."""
    return pod.metadata.labels.rank


def attempt_of(meta: ChildMeta) -> int:
    """Number of the attempt that a child Job or a worker belongs to, from its label."""
    return names.number_in(meta.labels.attempt)


def delete(pod: Pod, grace_seconds: int | None = None) -> Delete:
    """Exactly this pod; without `grace_seconds` by its own grace period."""
    meta = pod.metadata
    return Delete(
        kind=PODS,
        namespace=meta.namespace,
        name=meta.name,
        uid=meta.uid,
        grace_seconds=grace_seconds,
    )


def alive(pod: Pod) -> bool:
    """Whether the API says that a container of it may still run."""
    return pod.status.phase not in ("Succeeded", "Failed")


def stopped(pod: Pod) -> bool:
    """Whether the kubelet itself said that its containers have ended."""
    states = [status.state for status in pod.status.container_statuses]
    return not alive(pod) and bool(states) and all(state.terminated is not None for state in states)


def collected(pod: Pod) -> bool:
    """Whether it is called Failed in the kubelet's place, as its node is gone.

    The garbage collector of pods does that, and asks nobody of containers (gc_controller.go of
    Kubernetes, markFailedAndDeletePodWithCondition).
    """
    disruption = find_condition(pod.status.conditions, "DisruptionTarget")
    by_collector = disruption is not None and disruption.reason == "DeletionByPodGC"
    return not alive(pod) and by_collector and not stopped(pod)
