"""Errors of calls."""

from __future__ import annotations

import builtins
from typing import Any

from torchrun_sdk.text import escape


class SdkError(Exception):
    """Base of all errors of this package. The message says what to do next.

    Control characters are escaped, because the message may quote pods and the cluster.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(escape(message))


class UsageError(SdkError):
    """Invalid usage; nothing was created."""


class ClusterError(SdkError):
    """kubectl or the API server refused the request or is unreachable."""


class WrongRequest(UsageError, ClusterError):
    """The plugin refused the request as invalid usage, for example without a queue to use."""


class CallError(SdkError):
    """The call failed.

    job: the TorchrunJob, "" without one. rank, node: where it failed, None and "" if unknown.
    """

    def __init__(
        self, message: str, *, job: str = "", rank: int | None = None, node: str = ""
    ) -> None:
        super().__init__(message)
        self.job = job
        self.rank = rank
        self.node = node


class UntrustedPickle(SdkError):
    """A pod of `job` returned a pickle, which this call does not accept. It was not opened."""

    def __init__(self, message: str, *, job: str = "") -> None:
        super().__init__(message)
        self.job = job


class ProtocolError(CallError):
    """A message of a pod cannot be decoded. The job is unchanged."""


class RemoteException(CallError):
    """The function raised an exception: the first of all ranks, as it often causes the others.

    type: its class, for example `builtins.ValueError`. text: its message. traceback: as formatted
    in the pod.
    """

    def __init__(
        self, *, type: str, text: str, traceback: str, job: str, rank: int, node: str
    ) -> None:
        name = type[len("builtins.") :] if type.startswith("builtins.") else type
        super().__init__(
            f"{name}: {text} (rank {rank} on {node or 'an unknown machine'})\n\n"
            f"In the pod:\n{traceback.rstrip()}",
            job=job,
            rank=rank,
            node=node,
        )
        self.type = type
        self.text = text
        self.traceback = traceback

    def __str__(self) -> str:
        """The message; KeyError and others would show it in another form."""
        return str(self.args[0])


_OF_ITERATION = (StopIteration, StopAsyncIteration)


def remote_exception(base: str, **fields: Any) -> RemoteException:
    """A RemoteException that `except` also catches as the built-in class of this name.

    Only exceptions that a function may raise: not SystemExit, StopIteration and the like, which
    mean something else to the caller, nor groups, which need the exceptions themselves.
    """
    known = getattr(builtins, base, None)
    if not (isinstance(known, type) and issubclass(known, Exception)):
        return RemoteException(**fields)
    if known is Exception or "Group" in base or issubclass(known, _OF_ITERATION):
        return RemoteException(**fields)
    known = UnicodeError if issubclass(known, UnicodeError) else known  # the others need details
    kind = type("RemoteException", (RemoteException, known), {"__module__": __name__})
    error: RemoteException = kind(**fields)
    return error


class RankExited(CallError):
    """A rank ended without a result: os._exit, a signal, a crash of native code.

    exit_code: of the process, 128 + number for a signal. signal: number, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        exit_code: int | None,
        signal: int | None,
        job: str,
        rank: int | None,
        node: str,
    ) -> None:
        super().__init__(message, job=job, rank=rank, node=node)
        self.exit_code = exit_code
        self.signal = signal


class OutOfMemory(RankExited):
    """The kernel killed a process of the pod at its memory limit."""


class Evicted(CallError):
    """The kubelet evicted a pod because of its own resource usage."""


class JobFailed(CallError):
    """The TorchrunJob ended without results for another reason, which its status names."""

    def __init__(self, message: str, *, reason: str, job: str) -> None:
        super().__init__(message, job=job)
        self.reason = reason


class LaunchTimeout(CallError, TimeoutError):
    """Not all pods ran within launch_timeout; the message has the reason of the job."""


class QuorumTimeout(CallError, TimeoutError):
    """Not all workers responded within quorum_timeout."""


class CallTimeout(CallError, TimeoutError):
    """The function ran longer than timeout."""


class IncompatiblePython(CallError):
    """Pickles cannot be exchanged between these two versions of Python."""


class Detached(KeyboardInterrupt):
    """Ctrl-C: the call continues without this program. `job` is its TorchrunJob."""

    def __init__(self, job: str) -> None:
        super().__init__(f"detached from {job}")
        self.job = job
