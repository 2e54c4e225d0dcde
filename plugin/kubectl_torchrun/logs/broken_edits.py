"""Broken edits: in development mode, the pod of a failed command stays for the next edit."""

from collections.abc import Sequence

from kubectl_torchrun.cluster.client import Api, RequestError, Unreachable
from kubectl_torchrun.cluster.pods import is_training, rank_of
from kubectl_torchrun.cluster.session import Cluster
from kubectl_torchrun.cluster.slices import JobSlice
from torchrun_api import names
from torchrun_api.kinds.core import Pod

# The launcher prints this line at once and every 10 s while the pod waits for an edit.
_LAUNCHER = b"torchrun-launch: "
_EDIT = b"the next edit"
_NODES = 16  # whose logs are read


async def find_broken(api: Api, job: JobSlice, pods: Sequence[Pod]) -> Pod | None:
    """The first pod whose command failed after an edit and that waits for the next one."""
    if not (job.spec.development and job.status.phase == "Running"):
        return None
    workers = [
        pod for pod in pods if pod.metadata.labels.component == names.WORKER and is_training(pod)
    ]
    for pod in sorted(workers, key=rank_of)[:_NODES]:
        lines = await tail(api, pod, 1)
        if lines and is_waiting_line(lines[-1]):
            return pod
    return None


async def tail(api: Api, pod: Pod, count: int) -> list[bytes]:
    """The last lines of a pod's log; empty if it cannot be read."""
    try:
        query = {"tailLines": str(count)}
        async with api.log(pod.metadata.name, names.TRAINER_CONTAINER, query) as log:
            return [line.rstrip() async for line in log]
    except (RequestError, Unreachable):
        return []


def is_waiting_line(line: bytes) -> bool:
    """Whether this is the launcher's line that it waits for an edit."""
    return line.startswith(_LAUNCHER) and _EDIT in line


def describe(cluster: Cluster, job: JobSlice, pod: Pod) -> str:
    """One line for the user: the node, and the command that sends the next edit."""
    sync = cluster.command(f"torchrun sync {job.metadata.name}")
    return f"node {rank_of(pod)}: the command failed. Its pod waits for the next edit: {sync}"
