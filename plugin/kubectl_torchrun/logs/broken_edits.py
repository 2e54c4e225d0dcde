"""Broken edits: in development mode a command that failed keeps its pod for the next edit."""

from collections.abc import Sequence

from kubectl_torchrun.cluster.client import Api, ApiError, Unreachable
from kubectl_torchrun.cluster.mirror import has_started, rank_of
from kubectl_torchrun.cluster.session import Cluster
from kubectl_torchrun.cluster.slices import Job
from torchrun_api import names
from torchrun_api.core import Pod

# What the launcher says, at once and every 10 s, while a failed command's pod is kept for an edit.
_SAYS = b"torchrun-launch: "
_EDIT = b"the next edit"
_NODES = 16  # whose logs are looked at


async def broken(api: Api, job: Job, pods: Sequence[Pod]) -> Pod | None:
    """The first of the pods whose command failed after an edit, and that waits for the next."""
    if not (job.spec.development and job.status.phase == "Running"):
        return None
    workers = [pod for pod in pods if pod.metadata.labels.component == names.WORKER and runs(pod)]
    for pod in sorted(workers, key=rank_of)[:_NODES]:
        lines = await tail(api, pod, 1)
        if lines and is_word_of_waiting(lines[-1]):
            return pod
    return None


async def tail(api: Api, pod: Pod, count: int) -> list[bytes]:
    """The last lines of a worker's log; none where there is none to read."""
    try:
        query = {"tailLines": str(count)}
        async with api.log(pod.metadata.name, names.TRAINER_CONTAINER, query) as log:
            return [line.rstrip() async for line in log]
    except (ApiError, Unreachable):
        return []


def is_word_of_waiting(line: bytes) -> bool:
    """Whether the launcher says there that it waits for an edit."""
    return line.startswith(_SAYS) and _EDIT in line


def told(cluster: Cluster, job: Job, pod: Pod) -> str:
    """What a user is to know of it, in a line."""
    sync = cluster.command(f"torchrun sync {job.metadata.name}")
    return (
        f"node {rank_of(pod)}: the command failed; its pod is kept and waits for the next edit:"
        f" {sync}"
    )


def runs(pod: Pod) -> bool:
    """Whether its trainer has started and not ended."""
    return pod.status.phase == "Running" and has_started(pod, names.TRAINER_CONTAINER)
