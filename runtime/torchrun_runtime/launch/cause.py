"""Why a node ends: the cause in its termination message, and the errors of the launcher."""

from __future__ import annotations

import re
from typing import Mapping, NamedTuple

from .contract import LAUNCH_FAILED, PEER_LOSS
from .output import timestamp

_PEER_LOSS = re.compile("|".join(PEER_LOSS), re.IGNORECASE)
_SIGABRT, _SIGTERM = 6, 15
# Of a command that cannot start: an edit of the workspace may be the cause, and the correction.
_OF_COMMAND = frozenset({"CommandNotFound", "CommandNotExecutable", "WorkingDirMissing"})
WAS_STOPPED = "Stopped"  # of a node that was asked to end, or whose ranks are to start again
PEER_FAILED = "PeerFailed"  # of a node whose ranks end because those of another have failed
PEER_STOPPED = "PeerStopped"  # of a node whose ranks stopped because the pod of another is to end


class Cause(NamedTuple):
    """The cause in the termination message. exit_code: of the container."""

    exit_code: int
    rank: int | None
    signal: int | None
    reason: str
    message: str
    time: str

    def body(self) -> dict[str, object]:
        """The termination message for the controller."""
        return {
            "rank": self.rank,
            "exitCode": self.exit_code,
            "signal": self.signal,
            "reason": self.reason,
            "message": self.message,
            "time": self.time,
        }


def tells_peer_loss(message: str) -> bool:
    """Whether the message of an exception says that the process has lost its peer."""
    return bool(_PEER_LOSS.search(message))


def is_peer_loss(cause: Cause) -> bool:
    """Whether a rank only lost its peer, so that the cause is on another node."""
    return cause.reason in ("Exception", "ExitCode") and tells_peer_loss(cause.message)


def first_cause(causes: Mapping[int, Cause]) -> tuple[int, Cause]:
    """The node with the root cause, and the cause: a hang, a signal, the first exception.

    NCCL aborts the ranks that have lost a peer, so SIGABRT comes after exceptions.

    The order is that of the controller (torchrun_controller.reconcile.gang.failures).
    """

    def order(node_and_cause: tuple[int, Cause]) -> tuple[int, str]:
        cause = node_and_cause[1]
        if cause.reason == "OOMKilled":
            return 0, cause.time
        if cause.reason == "Hung":
            return 1, cause.time
        if cause.signal == _SIGTERM:
            return 6, cause.time
        if cause.signal is not None:
            return (4 if cause.signal == _SIGABRT else 2), cause.time
        has_lost_peer = cause.reason == PEER_FAILED or is_peer_loss(cause)
        return (5 if has_lost_peer else 3), cause.time

    return min(causes.items(), key=order)


class LaunchError(Exception):
    """reason: CamelCase; the message says what to do; exit_code: of the container."""

    def __init__(self, reason: str, message: str, exit_code: int = LAUNCH_FAILED) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.exit_code = exit_code

    @property
    def is_of_command(self) -> bool:
        """Whether it is a failure of the command in its round."""
        return self.reason in _OF_COMMAND

    @property
    def cause(self) -> Cause:
        """The cause of a launcher that ends with this error."""
        return Cause(self.exit_code, None, None, self.reason, self.message, timestamp())
