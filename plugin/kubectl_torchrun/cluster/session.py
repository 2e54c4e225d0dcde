"""A connection of a command to one namespace of a cluster."""

import asyncio  # for its CancelledError: anyio names the class inside its event loop only
import re
import shlex
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

import anyio

from kubectl_torchrun.cluster.client import Api, RequestError, Unreachable, Unreadable, connect
from kubectl_torchrun.cluster.kubectl import ClusterNamespace, Target, proxy, resolve
from kubectl_torchrun.errors import ClusterProblem, Problem, UsageProblem

T = TypeVar("T")

NOT_INSTALLED = (
    "The Torchrun Controller is not installed in this cluster.\n"
    "Ask an administrator to run: kubectl apply -f manifests/crd, and to install the controller."
)

# The words of the authorizer: pkg/endpoints/handlers/responsewriters/errors.go of k8s.io/apiserver.
_NO_PERMISSION = re.compile(r'\bUser ".*" cannot ')


class Cluster(NamedTuple):
    """A namespace of a cluster, and the socket of `kubectl proxy`.

    target: the flags of the user. pinned: the flags of the kubectl commands of this call.
    server: the address of the API server; empty where unknown.
    """

    target: Target
    namespace: str
    socket: Path
    pinned: Target = Target()
    server: str = ""

    @property
    def where(self) -> ClusterNamespace:
        """The namespace, also for memories of earlier calls."""
        return ClusterNamespace(self.server, self.namespace)

    def run(self, work: Callable[[Api], Awaitable[T]]) -> T:
        """Run `work` with a client.

        Raises Problem, which tells the user the next step, and KeyboardInterrupt for Ctrl-C.
        """

        async def connected() -> T:
            async with connect(self.socket, self.namespace) as api:
                return await work(api)

        try:
            return anyio.run(connected)
        except asyncio.CancelledError:
            # Only Ctrl-C cancels all of the work. At rare moments asyncio does not raise
            # KeyboardInterrupt for it.
            raise KeyboardInterrupt from None
        except Exception as error:
            if _closed_pipe(error):
                raise BrokenPipeError from error
            problem = explain(error, self.namespace, self.command("torchrun list"))
            if problem is None:
                raise
            raise problem from error

    def command(self, words: str, *arguments: str) -> str:
        """A kubectl command line for the user, for this namespace of this cluster.

        words: separated by spaces; arguments may have spaces.
        """
        flags = self.target.flags(namespace=False)
        return shlex.join(["kubectl", *words.split(), *arguments, "-n", self.namespace, *flags])


@contextmanager
def session(target: Target) -> Iterator[Cluster]:
    """The selected namespace, through `kubectl proxy`. Raises ClusterProblem."""
    where, pinned = resolve(target)
    with proxy(pinned) as socket:
        yield Cluster(target, where.name, socket, pinned, where.server)


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
            f"{error}\nThe plugin may be older than the controller's CRDs: update it, or use"
            " kubectl get -o yaml."
        )
    if isinstance(error, RequestError):
        return _refusal(error, namespace, jobs)
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions:
            problem = explain(member, namespace, jobs)
            if problem is not None:
                return problem
    return None


def _refusal(error: RequestError, namespace: str, jobs: str) -> Problem:
    match error.status:
        case 401:
            return ClusterProblem(
                f"kubectl is not logged in to this cluster: {error.message}\n"
                "Log in, then check with: kubectl auth whoami"
            )
        case 403 if not _NO_PERMISSION.search(error.message):  # a quota, a webhook
            return ClusterProblem(f"The API server refused the request: {error.message}")
        case 403:
            return ClusterProblem(
                f"{error.message}\nAn administrator can give you the role edit in namespace"
                f" {namespace}. List your permissions: kubectl auth can-i --list -n {namespace}"
            )
        case 404 if not error.details.name:
            return ClusterProblem(NOT_INSTALLED)
        case 404 if error.details.kind == "namespaces":
            return UsageProblem(
                f"Namespace {error.details.name} does not exist. Select another one with -n."
                " See: kubectl get namespaces"
            )
        case 404:
            return UsageProblem(f"{error.message} (namespace {namespace}). See: {jobs}")
        case 409:
            return UsageProblem(
                f"{error.message}. Choose another --name, or omit it to generate one."
            )
        case 400 | 422:
            causes = "".join(f"\n  {c.field}: {c.message}" for c in error.details.causes)
            return UsageProblem(f"The API server rejected the job: {causes or error.message}")
    return ClusterProblem(f"The API server returned HTTP {error.status}: {error.message}")
