"""The target of `exec` and `port-forward`, and the kubectl command for it."""

import os
import sys
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from kubectl_torchrun.cluster.client import Api
from kubectl_torchrun.cluster.kubectl import Target, find_kubectl
from kubectl_torchrun.cluster.pods import (
    attempt_of,
    end_of,
    has_started,
    list_workers,
    rank_of,
    ranks_of,
)
from kubectl_torchrun.cluster.session import session
from kubectl_torchrun.cluster.slices import JOBS
from kubectl_torchrun.errors import UsageProblem
from torchrun_api.names import TRAINER_CONTAINER


class Worker(NamedTuple):
    """A running trainer container, and the kubectl flags of its cluster."""

    flags: list[str]
    pod: str
    node: int

    def kubectl(self, *words: str) -> list[str]:
        """A kubectl command line in this cluster and namespace."""
        return [find_kubectl(), *self.flags, *words]

    def exec_command(self, words: Sequence[str], *flags: str) -> list[str]:
        """A kubectl command line that runs a command in the trainer container."""
        return self.kubectl("exec", *flags, self.pod, "-c", TRAINER_CONTAINER, "--", *words)


def find_worker(target: Target, name: str, node: int | None, rank: int | None) -> Worker:
    """The pod of the latest gang with this node or rank; default: node 0. Raises Problem."""
    with session(target) as cluster:
        job = cluster.run(lambda api: api.get(JOBS, name))

        async def running_workers(api: Api) -> tuple[int, list[tuple[int, str]]]:
            pods = await list_workers(api, job)
            newest = max(map(attempt_of, pods), default=0)
            index = node or 0
            if rank is not None:
                index = (await ranks_of(api, job)).node_of(rank)
            return index, [
                (rank_of(pod), pod.metadata.name)
                for pod in pods
                if attempt_of(pod) == newest
                and has_started(pod, TRAINER_CONTAINER)
                and end_of(pod, TRAINER_CONTAINER) is None
            ]

        index, running = cluster.run(running_workers)
        flags = cluster.pinned.flags()
        for pod_index, pod in running:
            if pod_index == index:
                return Worker(flags, pod, index)
        status = job.status
        nodes = ", ".join(str(pod_index) for pod_index, _ in sorted(running))
        raise UsageProblem(
            f"Node {index} of job {name} is not running."
            + (f" Running nodes: {nodes}." if running else f" The job is {status.phase or 'new'}.")
            + (f" {status.reason}: {status.message}" if status.reason else "")
        )


def replace_process(command: list[str]) -> NoReturn:
    """Replace this process by the program, whose exit code becomes that of the command."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command[0], command)  # noqa: S606  # an argument list, no shell
