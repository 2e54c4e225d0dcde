"""What the controller tells a running pod: annotations, which the kubelet writes to a file.

They open the start gate: no rank starts while a rank of an older gang may still write checkpoints.
Later they announce newer code.
"""

from __future__ import annotations

import json

from .cause import LaunchError
from .checkpoints import parse_candidates
from .contract import (
    COMPLETE_CHECKPOINTS_ANNOTATION,
    FENCE_ANNOTATION,
    IN_PLACE_ANNOTATION,
    START_ANNOTATION,
)
from .fencing import OlderWorker
from .gang.checkpoints import CompleteCheckpoint
from .gang.leader import Predecessor
from .output import say, wait_until

# The job's status shows why the gate is closed. The controller opens it or deletes the pod, so a
# timeout would only turn a wait into a failure.
_FOR_EVER = float("inf")
# Seconds. The kubelet takes 0.1 to 0.3 s to write a patch into the file. If it misses one, the
# controller's second patch brings it.
_POLL = 0.05


def values(file: str) -> dict[str, str]:
    """The values of all annotations at one moment, by name; empty if the file cannot be read.

    The kubelet replaces the file with a rename, so it may be missing for a moment.
    """
    if not file:
        return {}
    try:
        with open(file, encoding="utf-8") as stream:
            lines = stream.read().splitlines()
    except OSError:
        return {}
    pairs = (line.partition("=") for line in lines)
    return {name: quoted[1:-1] for name, _, quoted in pairs}


def annotation(file: str, name: str) -> str:
    """The value of one annotation; "" if it is not set or the file cannot be read."""
    return values(file).get(name, "")


def number(file: str, name: str) -> int:
    """An annotation as a number; 0 if it is not a number."""
    return to_number(annotation(file, name))


def to_number(text: str) -> int:
    """The number in the value of an annotation; 0 if it is not a number."""
    return int(text) if text.isdigit() else 0


def pass_gate(start_file: str, attempt: str) -> list[OlderWorker]:
    """Wait until the pod's annotations, a downward-API file, permit this attempt to start ranks.

    Returns the workers of older gangs to fence before ranks start.
    """
    if not start_file:
        return []
    if not _may_start(start_file, attempt):
        say("waiting at the start gate until all pods of the previous attempt have stopped")
        wait_until(
            lambda: _may_start(start_file, attempt),
            _FOR_EVER,
            "the controller to open the start gate",
            pause=_POLL,
            longest_pause=_POLL,
        )
    return workers_in(annotation(start_file, FENCE_ANNOTATION))


def has_fence_order(start_file: str) -> bool:
    """Whether the pod itself had to fence workers of older gangs."""
    return bool(start_file and annotation(start_file, FENCE_ANNOTATION))


def is_open(start_file: str, attempt: str) -> bool:
    """Whether the pod itself has the permission of the controller."""
    return not start_file or _may_start(start_file, attempt)


def read_predecessor(start_file: str) -> Predecessor:
    """What earlier pods of node 0 left, once the gate is open."""
    words = annotation(start_file, IN_PLACE_ANNOTATION).split()
    numbers = [int(word) for word in words if word.isdigit()]
    restarts, first_round = numbers if len(numbers) == 2 else (0, 0)
    return Predecessor(restarts, first_round, _read_checkpoints(start_file))


def _read_checkpoints(start_file: str) -> tuple[CompleteCheckpoint, ...]:
    """The checkpoints of earlier pods and gangs. The kubelet quotes the value as Go does (%q)."""
    try:
        value = json.loads(f'"{annotation(start_file, COMPLETE_CHECKPOINTS_ANNOTATION)}"')
    except ValueError:
        return ()
    return parse_candidates(value)


def _may_start(start_file: str, attempt: str) -> bool:
    """Whether the annotation permits the start."""
    return bool(attempt) and annotation(start_file, START_ANNOTATION) == attempt


def workers_in(order: str) -> list[OlderWorker]:
    """Parse an order to fence: a time, then attempts with indexes, as in 0:1 1:0-3,7.

    Raises LaunchError if it cannot be parsed, as the workers to wait for are unknown then.
    """
    workers = []
    for word in order.split()[1:]:
        attempt, _, ranges = word.partition(":")
        try:
            for each in ranges.split(","):
                first, _, last = each.partition("-")
                indexes = range(int(first), int(last or first) + 1)
                workers += [OlderWorker(int(attempt), index) for index in indexes]
        except ValueError as error:
            raise LaunchError(
                "Fenced", f"The annotation of workers to fence is invalid: {word[:80]!r}."
            ) from error
    return workers
