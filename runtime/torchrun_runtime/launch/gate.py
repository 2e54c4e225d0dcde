"""The start gate: no rank starts beside one of an older gang that may still write checkpoints."""

from __future__ import annotations

from .contract import FENCE_ANNOTATION, START_ANNOTATION
from .errors import LaunchError
from .fencing import Worker
from .output import say, wait_until
from .podinfo import annotation

# The controller knows why the gate is closed and says so in the job's status; it opens the gate or
# deletes the pod. An end of our own would only turn a wait into a failure.
_FOR_EVER = float("inf")
# Seconds. The kubelet takes 0.1 to 0.3 s to bring a patch into the file; one that it misses comes
# with the controller's second patch.
_POLL = 0.05


def pass_gate(start_file: str, attempt: str) -> list[Worker]:
    """Wait until the pod's annotations, a downward-API file, hold the go-ahead of this attempt.

    Returns the workers of older gangs that are to be fenced before ranks start.
    """
    if not start_file:
        return []
    if not _may_start(start_file, attempt):
        say("everything is prepared; the gate opens when the last of the old gang has stopped")
        wait_until(
            lambda: _may_start(start_file, attempt),
            _FOR_EVER,
            "the go-ahead of the controller",
            pause=_POLL,
            longest_pause=_POLL,
        )
    return workers_in(annotation(start_file, FENCE_ANNOTATION))


def _may_start(start_file: str, attempt: str) -> bool:
    return bool(attempt) and annotation(start_file, START_ANNOTATION) == attempt


def workers_in(order: str) -> list[Worker]:
    """The workers of an order to fence: a time, then attempts with indexes, as in 0:1 1:0-3,7.

    Raises LaunchError where it cannot be read: nobody knows then whom it is for.
    """
    found = []
    for word in order.split()[1:]:
        attempt, _, ranges = word.partition(":")
        try:
            for each in ranges.split(","):
                first, _, last = each.partition("-")
                indexes = range(int(first), int(last or first) + 1)
                found += [Worker(int(attempt), index) for index in indexes]
        except ValueError as error:
            raise LaunchError("Fenced", f"the order to fence {word[:80]!r} is none") from error
    return found
