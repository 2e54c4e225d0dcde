"""A debug log line before each decision about a job, with all that the decision depends on.

`python -m observed_log` in `tests` prints the Plan of such a line.
"""

import logging
from datetime import datetime
from typing import Any

import msgspec
import structlog
from msgspec import Raw, Struct

from torchrun_controller.controllers.controller import log_fields
from torchrun_controller.logs import REDACTED, names_secret
from torchrun_controller.reconcile import reconcile
from torchrun_controller.reconcile.model.observed import Defaults, Observed
from torchrun_controller.reconcile.model.plan import Plan

# kubectl's copy of the manifest, which contains everything.
_MANIFEST = "kubectl.kubernetes.io/last-applied-configuration"
_COMMANDS = ("command", "args", "setupCommand")

log: structlog.typing.FilteringBoundLogger = structlog.get_logger(__name__)


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
