"""Redaction of recordings: values of environment variables, commands, and applied manifests.

Names stay readable. A Plan from a redacted recording has *** in place of each value, so values that
the controller compares may differ.
"""

from typing import Any

import msgspec
from msgspec import Raw

REDACTED = "***"
# Fields with lists of {name, value}, and fields with commands.
_NAMED_VALUES = ("env",)
_COMMANDS = ("command", "args", "setupCommand")
# kubectl's copy of the manifest, which contains all of these.
_MANIFEST = "kubectl.kubernetes.io/last-applied-configuration"


def redact(text: bytes) -> Raw:
    """Return the JSON with REDACTED in place of these values. Raises ValueError without JSON."""
    return Raw(msgspec.json.encode(_redact_value(msgspec.json.decode(text))))


def _redact_value(value: Any) -> Any:  # noqa: ANN401 any JSON
    if isinstance(value, list):
        return [_redact_value(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: _redact_entry(key, item) for key, item in value.items()}


def _redact_entry(key: str, value: Any) -> Any:  # noqa: ANN401 any JSON
    if key == _MANIFEST:
        return REDACTED
    if key in _NAMED_VALUES and isinstance(value, list):
        return [_redact_variable(item) for item in value]
    if key in _COMMANDS and isinstance(value, str | list):
        return REDACTED if isinstance(value, str) else [REDACTED]
    return _redact_value(value)


def _redact_variable(entry: Any) -> Any:  # noqa: ANN401 any JSON
    if isinstance(entry, dict) and "value" in entry:
        return {**entry, "value": REDACTED}
    return entry
