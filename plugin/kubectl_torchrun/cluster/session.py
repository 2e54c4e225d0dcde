"""A namespace of a cluster within reach of a command."""

import shlex
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

import anyio

from kubectl_torchrun.cluster.client import Api, connect
from kubectl_torchrun.cluster.explain import explain
from kubectl_torchrun.cluster.kubectl import Target, namespace, proxy

T = TypeVar("T")


class Cluster(NamedTuple):
    """A namespace of a cluster within reach."""

    target: Target
    namespace: str
    socket: Path

    def run(self, work: Callable[[Api], Awaitable[T]]) -> T:
        """Do the work with a client. Raises Problem with what a user can do about a failure."""

        async def connected() -> T:
            async with connect(self.socket, self.namespace) as api:
                return await work(api)

        try:
            return anyio.run(connected)
        except Exception as error:
            if _closed_pipe(error):
                raise BrokenPipeError from error
            problem = explain(error, self.namespace, self.command("torchrun list"))
            if problem is None:
                raise
            raise problem from error

    def command(self, words: str) -> str:
        """A kubectl command line that means this namespace of this cluster."""
        flags = self.target.flags(namespace=False)
        return shlex.join(["kubectl", *words.split(), "-n", self.namespace, *flags])


@contextmanager
def session(target: Target) -> Iterator[Cluster]:
    """The namespace that is meant, reached through `kubectl proxy`. Raises ClusterProblem."""
    where = namespace(target)
    with proxy(target) as socket:
        yield Cluster(target, where, socket)


def _closed_pipe(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(_closed_pipe(member) for member in error.exceptions)
    return isinstance(error, BrokenPipeError)
