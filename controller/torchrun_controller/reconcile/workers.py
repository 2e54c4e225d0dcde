"""What the pods of a gang say: how many run, and why one waits."""

import msgspec

from torchrun_api.core import Pod
from torchrun_api.job import WorkersStatus
from torchrun_api.kinds import PODS
from torchrun_controller.reconcile.plan import Delete

IMAGE_REASONS = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "ErrImageNeverPull",
        "InvalidImageName",
        "ImageInspectError",
        "RegistryUnavailable",
    }
)


class Why(msgspec.Struct, frozen=True):
    """A reason in CamelCase and a message that a person can act on."""

    reason: str
    message: str


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
    return any(c.type == "Ready" and c.status == "True" for c in pod.status.conditions)


def scheduled(pods: tuple[Pod, ...]) -> int:
    """How many have a node."""
    return sum(bool(pod.spec.node_name) for pod in pods)


def why_waiting(pod: Pod) -> Why | None:
    """Why a pod does not start, where something is known to be wrong."""
    for condition in pod.status.conditions:
        if condition.type == "PodScheduled" and condition.status == "False":
            return Why("Unschedulable", f"pod {pod.metadata.name}: {condition.message}")
    for container in pod.status.init_container_statuses + pod.status.container_statuses:
        waiting = container.state.waiting
        if waiting is None or waiting.reason in ("", "PodInitializing", "ContainerCreating"):
            continue
        reason = "ImagePullFailed" if waiting.reason in IMAGE_REASONS else waiting.reason
        detail = waiting.message or waiting.reason
        return Why(reason, f"pod {pod.metadata.name}, container {container.name}: {detail}")
    return None


def first_reason(pods: tuple[Pod, ...]) -> Why | None:
    """The first reason that any of the pods gives, in the order of their indexes."""
    found = (why_waiting(pod) for pod in sorted(pods, key=_index) if pod.status.phase == "Pending")
    return next((why for why in found if why is not None), None)


def _index(pod: Pod) -> int:
    index = pod.metadata.labels.completion_index
    return int(index) if index.isdecimal() else 0


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
    """Whether a container of it may still run."""
    return pod.status.phase not in ("Succeeded", "Failed")
