"""Facts about the pods of a job, and which ranks run on which of them."""

from datetime import datetime
from typing import NamedTuple

from kubectl_torchrun.cluster.client import Api, RequestError
from kubectl_torchrun.cluster.slices import JOBS, PODS, QUEUES, JobSlice, QueueSpecSlice
from torchrun_api import names
from torchrun_api.kinds.core import Pod, StateTerminated
from torchrun_api.kinds.meta import find_controller


async def list_pods(api: Api, job: JobSlice, selector: str = "") -> list[Pod]:
    """The pods of this job, with these labels. Raises ApiError."""
    labels = ",".join(part for part in (f"{names.JOB_LABEL}={job.metadata.name}", selector) if part)
    pods = (await api.list(PODS, {"labelSelector": labels})).items
    return [pod for pod in pods if belongs_to(pod, job.metadata.uid)]


def belongs_to(pod: Pod, uid: str) -> bool:
    """Whether a pod with the name of the job can be of the job with this UID.

    Pods of a deleted job of the same name may still run. A label of theirs has its UID.
    """
    owner = find_controller(pod.metadata.owner_references)
    if owner is not None and owner.kind == JOBS.kind:
        return owner.uid == uid
    return pod.metadata.labels.job_uid in ("", uid)


async def list_workers(api: Api, job: JobSlice) -> list[Pod]:
    """The workers of all attempts that still exist. Raises ApiError."""
    return await list_pods(api, job, f"{names.COMPONENT_LABEL}={names.WORKER}")


async def list_running(api: Api, job: JobSlice) -> list[Pod]:
    """The workers of the newest gang whose trainer container runs, by index. Raises ApiError."""
    workers = await list_workers(api, job)
    newest = max(map(attempt_of, workers), default=0)
    running = [
        pod
        for pod in workers
        if attempt_of(pod) == newest
        and has_started(pod, names.TRAINER_CONTAINER)
        and end_of(pod, names.TRAINER_CONTAINER) is None
    ]
    return sorted(running, key=rank_of)


def attempt_of(pod: Pod) -> int:
    """The number of the attempt that the pod belongs to."""
    text = pod.metadata.labels.attempt
    return int(text) if text.isdecimal() else 0


def rank_of(pod: Pod) -> int:
    """The worker's number in its gang."""
    return pod.metadata.labels.rank


def has_started(pod: Pod, container: str) -> bool:
    """Whether the container runs or has ended, so that there is a log to read."""
    states = [status.state for status in pod.status.container_statuses if status.name == container]
    return any(state.running is not None or state.terminated is not None for state in states)


def end_of(pod: Pod, container: str) -> StateTerminated | None:
    """How the container ended; None before its end."""
    for status in pod.status.container_statuses:
        if status.name == container:
            return status.state.terminated
    return None


def started_at(pod: Pod, container: str) -> datetime | None:
    """When the container started; None before that."""
    for status in pod.status.container_statuses:
        if status.name == container:
            state = status.state.running or status.state.terminated
            return state.started_at if state else None
    return None


def is_training(pod: Pod) -> bool:
    """Whether the pod runs and its trainer container has started."""
    return pod.status.phase == "Running" and has_started(pod, names.TRAINER_CONTAINER)


def trouble(pod: Pod) -> str:
    """Why a pod does not run: the report of the scheduler, the kubelet or its container."""
    for status in (*pod.status.init_container_statuses, *pod.status.container_statuses):
        waiting, terminated = status.state.waiting, status.state.terminated
        if waiting is not None and waiting.reason not in ("", "PodInitializing"):
            return f"{waiting.reason} {waiting.message}".strip()
        if terminated is not None and terminated.exit_code:
            return f"{terminated.reason or 'Error'} (exit code {terminated.exit_code})"
    for condition in pod.status.conditions:
        if condition.type == "PodScheduled" and condition.status == "False":
            return f"{condition.reason}: {condition.message}"
    return " ".join(part for part in (pod.status.reason, pod.status.message) if part)


class Ranks(NamedTuple):
    """Processes of each node; those of node 0 are `head`, if it has a separate Job."""

    each: int = 1
    head: int | None = None

    def node_of(self, rank: int) -> int:
        """The node on which a rank is."""
        first = self.first_of(1)
        return 0 if rank < first else 1 + (rank - first) // self.each

    def first_of(self, node: int) -> int:
        """The lowest rank of a node."""
        if node == 0:
            return 0
        return (self.each if self.head is None else self.head) + (node - 1) * self.each


async def ranks_of(api: Api, job: JobSlice) -> Ranks:
    """Processes of each node: set by the job or the queue, else its number of GPUs, else one."""
    nproc = job.spec.distributed.nproc_per_node
    if isinstance(nproc, int):
        return Ranks(max(nproc, 1))
    try:
        queue = (await api.get(QUEUES, job.spec.job_queue)).spec
    except RequestError:  # it may be deleted or forbidden
        queue = QueueSpecSlice()
    nproc = queue.distributed.nproc_per_node
    if isinstance(nproc, int):
        return Ranks(max(nproc, 1))
    gpus, nodes = job.status.gpus or 0, job.status.num_nodes or 1
    if job.spec.head is None:
        return Ranks(max(gpus // nodes, 1))
    own = job.spec.head.node_resources.gpus
    of_head = queue.node_resources.gpus if own is None else own
    return Ranks(max((gpus - of_head) // max(nodes - 1, 1), 1), max(of_head, 1))
