"""The worker that `exec` and `port-forward` are for, and kubectl's own command for it."""

import os
import sys
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from kubectl_torchrun.cluster.client import Api
from kubectl_torchrun.cluster.kubectl import Target, find_kubectl
from kubectl_torchrun.cluster.pods import attempt_of, end_of, has_started, list_workers, rank_of
from kubectl_torchrun.cluster.ranks import ranks_of
from kubectl_torchrun.cluster.session import session
from kubectl_torchrun.cluster.slices import JOBS
from kubectl_torchrun.errors import UsageProblem
from torchrun_api.names import TRAINER_CONTAINER


class Worker(NamedTuple):
    """A running trainer container, and the flags that lead to it."""

    flags: list[str]
    pod: str
    node: int

    def kubectl(self, *words: str) -> list[str]:
        """A kubectl command line in this cluster and namespace."""
        return [find_kubectl(), *self.flags, *words]

    def exec_command(self, words: Sequence[str], *flags: str) -> list[str]:
        """A kubectl command line that runs the words in the trainer container."""
        return self.kubectl("exec", *flags, self.pod, "-c", TRAINER_CONTAINER, "--", *words)


def find_worker(target: Target, name: str, node: int | None, rank: int | None) -> Worker:
    """The worker of the newest gang with this node or rank; default: node 0. Raises Problem."""
    with session(target) as cluster:
        job = cluster.run(lambda api: api.get(JOBS, name))

        async def running_workers(api: Api) -> tuple[int, list[tuple[int, str]]]:
            pods = await list_workers(api, job)
            newest = max(map(attempt_of, pods), default=0)
            wanted = node or 0
            if rank is not None:
                wanted = (await ranks_of(api, job)).node_of(rank)
            return wanted, [
                (rank_of(pod), pod.metadata.name)
                for pod in pods
                if attempt_of(pod) == newest
                and has_started(pod, TRAINER_CONTAINER)
                and end_of(pod, TRAINER_CONTAINER) is None
            ]

        wanted, running = cluster.run(running_workers)
        flags = ["-n", cluster.namespace, *target.flags(namespace=False)]
        for index, pod in running:
            if index == wanted:
                return Worker(flags, pod, index)
        status = job.status
        nodes = ", ".join(str(index) for index, _ in sorted(running))
        raise UsageProblem(
            f"Node {wanted} of {name} does not run"
            + (f"; nodes {nodes} do." if running else f": the job is {status.phase or 'new'}.")
            + (f" {status.reason}: {status.message}" if status.reason else "")
        )


def replace_process(command: list[str]) -> NoReturn:
    """Become this program, whose exit code is then that of the command."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command[0], command)  # noqa: S606  # an argument list, no shell
