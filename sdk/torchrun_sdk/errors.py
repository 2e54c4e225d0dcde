"""What can go wrong with a call, each as its own type."""

from __future__ import annotations

from torchrun_sdk.text import escape


class SdkError(Exception):
    """Base of all errors of this package. The message says what to do.

    It may quote pods and the cluster, so its control characters are escaped.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(escape(message))


class UsageError(SdkError):
    """The call cannot be made as it is written; nothing was created."""


class ClusterError(SdkError):
    """kubectl or the API server refused, or was not reached."""


class CallError(SdkError):
    """The call came to nothing. `job` is the TorchrunJob, "" where there is none yet.

    rank, node: where it happened, None and "" where that is not known.
    """

    def __init__(
        self, message: str, *, job: str = "", rank: int | None = None, node: str = ""
    ) -> None:
        super().__init__(message)
        self.job = job
        self.rank = rank
        self.node = node


class UntrustedPickle(SdkError):
    """A pod of `job` answers with a pickle that was not asked for. It was not opened."""

    def __init__(self, message: str, *, job: str = "") -> None:
        super().__init__(message)
        self.job = job


class ProtocolError(CallError):
    """What a pod says cannot be read. The job is left as it is."""


class RemoteException(CallError):
    """The function raised. The first exception of all ranks; others often follow from it.

    type: its class, as `builtins.ValueError`. text: what it says. traceback: as it was formatted
    in the pod.
    """

    def __init__(
        self, *, type: str, text: str, traceback: str, job: str, rank: int, node: str
    ) -> None:
        name = type[len("builtins.") :] if type.startswith("builtins.") else type
        super().__init__(
            f"{name}: {text} (rank {rank} on {node or 'an unknown node'})\n\n"
            f"In the pod:\n{traceback.rstrip()}",
            job=job,
            rank=rank,
            node=node,
        )
        self.type = type
        self.text = text
        self.traceback = traceback


class RankExited(CallError):
    """A rank ended without a result: os._exit, a signal, a crash of native code.

    exit_code: of the process, 128 + number for a signal. signal: its number, or None.
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
    """The kernel killed a process of the pod for its memory limit."""


class Evicted(CallError):
    """The kubelet evicted a pod, for what it used itself."""


class JobFailed(CallError):
    """The TorchrunJob ended otherwise without results; `reason` is the word of its status."""

    def __init__(self, message: str, *, reason: str, job: str) -> None:
        super().__init__(message, job=job)
        self.reason = reason


class LaunchTimeout(CallError, TimeoutError):
    """Not all pods ran within launch_timeout; the message has the job's own reason."""


class QuorumTimeout(CallError, TimeoutError):
    """Not as many workers as asked for answered within quorum_timeout."""


class CallTimeout(CallError, TimeoutError):
    """The function ran longer than timeout."""


class IncompatiblePython(CallError):
    """Pickled values cannot travel between these two versions of Python."""


class Detached(KeyboardInterrupt):
    """Ctrl-C: the call goes on without this program. `job` is its TorchrunJob."""

    def __init__(self, job: str) -> None:
        super().__init__(f"detached from {job}")
        self.job = job
