"""The log lines of decisions: what each depends on, at level debug, and what came of it.

The latter are written once, after their write has succeeded. The event names are stable, because
users search for them: `phase changed`, `reason changed`, `attempt created`, `attempt ended`,
`restarted in place`, `admitted`, `preempted`, `object created`, `object deleted`. Each line names
its job or queue as namespace/name, and the UID.

`python -m observed_log` in `tests` prints the Plan of a line with the message `observed`.
"""

import logging
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

import msgspec
import structlog
from msgspec import Raw, Struct

from torchrun_api.json import JsonObject
from torchrun_api.kinds.resources import JOBS
from torchrun_api.kinds.status import Attempt, TorchrunJobStatus
from torchrun_api.names import ATTEMPT_LABEL
from torchrun_controller.controllers.controller import log_fields
from torchrun_controller.logs import REDACTED, names_secret
from torchrun_controller.reconcile import reconcile
from torchrun_controller.reconcile.model.observed import Defaults, Observed
from torchrun_controller.reconcile.model.plan import Apply, Plan
from torchrun_controller.reconcile.model.times import order_of

# kubectl's copy of the manifest, which contains everything.
_MANIFEST = "kubectl.kubernetes.io/last-applied-configuration"
_COMMANDS = ("command", "args", "setupCommand")

log: structlog.typing.FilteringBoundLogger = structlog.get_logger(__name__)


class LogLine(Struct, frozen=True):
    """A log line: its event, and its fields in order."""

    event: str
    fields: Mapping[str, object]


def status_lines(before: TorchrunJobStatus, after: TorchrunJobStatus) -> list[LogLine]:
    """Return the lines for a job's new status. Counts of workers and progress cause none."""
    lines = [_attempt_ended(attempt, after) for attempt in _ended_attempts(before, after)]
    state = {"phase": after.phase, "reason": after.reason, "why": after.message}
    if after.phase != before.phase:
        fields = {"attempt": after.attempt, "was": before.phase, **state}
        lines.append(LogLine("phase changed", fields))
    elif after.reason != before.reason:
        lines.append(LogLine("reason changed", {"attempt": after.attempt, **state}))
    return lines


def creation_line(intent: Apply) -> LogLine:
    """Return the line for a created object."""
    object_name = f"{intent.kind.kind}/{intent.name}"
    labels = _metadata(intent).get("labels")
    attempt = labels.get(ATTEMPT_LABEL) if isinstance(labels, dict) else None
    if intent.kind is JOBS and isinstance(attempt, str):
        return LogLine("attempt created", {"attempt": int(attempt), "object": object_name})
    return LogLine("object created", {"object": object_name})


def _ended_attempts(before: TorchrunJobStatus, after: TorchrunJobStatus) -> Iterator[Attempt]:
    known = set(map(order_of, before.attempts))
    return (attempt for attempt in after.attempts if order_of(attempt) not in known)


def _attempt_ended(attempt: Attempt, after: TorchrunJobStatus) -> LogLine:
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
        return LogLine(
            "restarted in place", {"attempt": attempt.number, "round": attempt.round, **fields}
        )
    return LogLine("attempt ended", fields)


def _metadata(intent: Apply) -> JsonObject:
    metadata = intent.body["metadata"]
    assert isinstance(metadata, dict)
    return metadata


class Input(Struct, frozen=True):
    """The arguments of reconcile."""

    observed: Observed
    now: datetime
    defaults: Defaults


def reconcile_logged(observed: Observed, now: datetime, defaults: Defaults) -> Plan:
    """Return the Plan of reconcile. Log its arguments first if the level is debug."""
    if log.is_enabled_for(logging.DEBUG):
        values = msgspec.to_builtins(
            Input(observed, now, defaults), enc_hook=lambda kind: kind.__name__
        )
        text = msgspec.json.encode(_redact(values))
        log.debug("observed", **log_fields("job", observed.job), input=Raw(text))
    return reconcile(observed, now, defaults)


def _redact(value: Any) -> Any:  # noqa: ANN401 any JSON
    """Replace what may hold a secret: variables, commands but for the program, and passwords."""
    if isinstance(value, list | tuple):
        return [_redact(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "name" in value and "value" in value:  # of a container, or a header of a probe
        return {**value, "value": REDACTED}
    return {key: _redact_entry(key, item) for key, item in value.items()}


def _redact_entry(key: str, value: Any) -> Any:  # noqa: ANN401 any JSON
    if key in _COMMANDS and isinstance(value, str | list | tuple):
        return _redact_command(value)
    if isinstance(value, str) and (key == _MANIFEST or _is_secret(key)):
        return REDACTED
    return _redact(value)


def _is_secret(key: str) -> bool:
    return names_secret(key) and not key.endswith(("secretName", "sha256"))


def _redact_command(command: str | list[str] | tuple[str, ...]) -> str | list[str]:
    """Keep the first word, on which the launcher depends, unless it is an assignment."""
    words = command.split() if isinstance(command, str) else [*command]
    kept = [word for word in words[:1] if "=" not in word]
    redacted = kept + [REDACTED] * (len(words) > len(kept))
    return " ".join(redacted) if isinstance(command, str) else redacted
