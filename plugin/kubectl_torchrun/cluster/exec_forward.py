"""The target of `exec` and `port-forward`, and the kubectl command for it."""

import os
import sys
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from kubectl_torchrun.cluster.client import Api
from kubectl_torchrun.cluster.kubectl import Target, find_kubectl
from kubectl_torchrun.cluster.pods import list_running, rank_of, ranks_of
from kubectl_torchrun.cluster.session import Cluster, session
from kubectl_torchrun.cluster.slices import JOBS
from kubectl_torchrun.errors import UsageProblem
from torchrun_api.kinds.core import Pod
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
        return find_worker_in(cluster, name, node, rank)


def find_worker_in(cluster: Cluster, name: str, node: int | None, rank: int | None) -> Worker:
    """The same in an open session."""
    job = cluster.run(lambda api: api.get(JOBS, name))

    async def look(api: Api) -> tuple[int, list[Pod]]:
        index = node or 0
        if rank is not None:
            ranks = await ranks_of(api, job)
            index = ranks.node_of(rank)
            all_ranks = ranks.first_of(job.status.num_nodes or index + 1)
            if rank >= all_ranks:
                raise UsageProblem(f"Job {name} has no rank {rank}. Its ranks: 0-{all_ranks - 1}.")
        return index, await list_running(api, job)

    index, running = cluster.run(look)
    flags = cluster.pinned.flags()
    for pod in running:
        if rank_of(pod) == index:
            return Worker(flags, pod.metadata.name, index)
    status = job.status
    next_words = f"torchrun {'why' if job.has_ended else 'status'}"
    nodes = ", ".join(str(rank_of(pod)) for pod in running)
    raise UsageProblem(
        f"Node {index} of job {name} is not running."
        + (f" Running nodes: {nodes}." if running else f" The job is {status.phase or 'new'}.")
        + (f" {status.reason}: {status.message}" if status.reason else "")
        + f"\nSee: {cluster.command(next_words, name)}"
    )


def replace_process(command: list[str]) -> NoReturn:
    """Replace this process by the program, whose exit code becomes that of the command."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command[0], command)  # noqa: S606  # an argument list, no shell
