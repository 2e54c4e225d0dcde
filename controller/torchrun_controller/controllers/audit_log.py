"""The log lines of decisions. Each is written once, after its write has succeeded.

The event names are stable, because users search for them: `phase changed`, `reason changed`,
`attempt created`, `attempt ended`, `restarted in place`, `admitted`, `preempted`, `object created`,
`object deleted`. Each line names its job or queue as namespace/name, and the UID.
"""

from collections.abc import Iterator, Mapping

from msgspec import Struct

from torchrun_api.json import JsonObject
from torchrun_api.kinds import JOBS
from torchrun_api.names import ATTEMPT_LABEL
from torchrun_api.status import Attempt, TorchrunJobStatus
from torchrun_controller.reconcile.model.plan import Apply
from torchrun_controller.reconcile.model.times import order_of


class Line(Struct, frozen=True):
    """A log line: its event, and its fields in order."""

    event: str
    fields: Mapping[str, object]


def status_lines(before: TorchrunJobStatus, after: TorchrunJobStatus) -> list[Line]:
    """Return the lines for a job's new status. Counts of workers and progress cause none."""
    lines = [_attempt_ended(attempt, after) for attempt in _ended_attempts(before, after)]
    state = {"phase": after.phase, "reason": after.reason, "why": after.message}
    if after.phase != before.phase:
        fields = {"attempt": after.attempt, "was": before.phase, **state}
        lines.append(Line("phase changed", fields))
    elif after.reason != before.reason:
        lines.append(Line("reason changed", {"attempt": after.attempt, **state}))
    return lines


def creation_line(intent: Apply) -> Line:
    """Return the line for a created object."""
    object_name = f"{intent.kind.kind}/{intent.name}"
    labels = _metadata(intent).get("labels")
    attempt = labels.get(ATTEMPT_LABEL) if isinstance(labels, dict) else None
    if intent.kind is JOBS and isinstance(attempt, str):
        return Line("attempt created", {"attempt": int(attempt), "object": object_name})
    return Line("object created", {"object": object_name})


def _ended_attempts(before: TorchrunJobStatus, after: TorchrunJobStatus) -> Iterator[Attempt]:
    known = set(map(order_of, before.attempts))
    return (attempt for attempt in after.attempts if order_of(attempt) not in known)


def _attempt_ended(attempt: Attempt, after: TorchrunJobStatus) -> Line:
    fields = {
        "attempt": attempt.number,
        "phase": after.phase,
        "reason": attempt.reason,
        "why": attempt.message,
        "counted": attempt.counted,
        "restarts": after.restarts,
        "disruptions": after.disruptions,
    }
    if attempt.round is not None:
        return Line(
            "restarted in place", {"attempt": attempt.number, "round": attempt.round, **fields}
        )
    return Line("attempt ended", fields)


def _metadata(intent: Apply) -> JsonObject:
    metadata = intent.body["metadata"]
    assert isinstance(metadata, dict)
    return metadata
