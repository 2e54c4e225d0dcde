"""A namespace of a cluster within reach of a command."""

import shlex
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

import anyio

from kubectl_torchrun.cluster.client import Api, ApiError, Unreachable, Unreadable, connect
from kubectl_torchrun.cluster.kubectl import Target, namespace, proxy
from kubectl_torchrun.errors import ClusterProblem, Problem, UsageProblem

T = TypeVar("T")

NOT_INSTALLED = (
    "The Torchrun Controller is not installed in this cluster: it does not know TorchrunJobs.\n"
    "An administrator installs it: kubectl apply -f manifests/crd, then the controller itself."
)


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


def explain(error: BaseException, namespace: str, jobs: str) -> Problem | None:
    """The problem to show for this error; None for a bug of this program.

    jobs: the command line that lists the namespace's jobs.
    """
    if isinstance(error, Problem):
        return error
    if isinstance(error, Unreachable):
        return ClusterProblem(
            f"{error}\nIs the cluster up, and is this the right context?"
            " See: kubectl cluster-info; kubectl config current-context"
        )
    if isinstance(error, Unreadable):
        return ClusterProblem(
            f"{error}\nIs this plugin older than the controller's CRDs? To see the object as it is,"
            " use kubectl get -o yaml."
        )
    if isinstance(error, ApiError):
        return _refusal(error, namespace, jobs)
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions:
            problem = explain(member, namespace, jobs)
            if problem is not None:
                return problem
    return None


def _refusal(error: ApiError, namespace: str, jobs: str) -> Problem:
    match error.status:
        case 401:
            return ClusterProblem(
                f"kubectl is not logged in to this cluster: {error.message}\n"
                "Log in as for any other kubectl command, and try: kubectl auth whoami"
            )
        case 403:
            return ClusterProblem(
                f"{error.message}\nAn administrator can give you the role edit in the namespace"
                f" {namespace}. What is allowed now: kubectl auth can-i --list -n {namespace}"
            )
        case 404 if not error.details.name:
            return ClusterProblem(NOT_INSTALLED)
        case 404 if error.details.kind == "namespaces":
            return UsageProblem(
                f"There is no namespace {error.details.name}. Choose one with -n;"
                " see: kubectl get namespaces"
            )
        case 404:
            return UsageProblem(f"{error.message} (namespace {namespace}). See: {jobs}")
        case 409:
            return UsageProblem(
                f"{error.message}. Choose another --name, or none to have one made up."
            )
        case 400 | 422:
            causes = "".join(f"\n  {c.field}: {c.message}" for c in error.details.causes)
            return UsageProblem(f"The job was refused: {causes or error.message}")
    return ClusterProblem(f"The API server says: {error.message} (HTTP {error.status})")
