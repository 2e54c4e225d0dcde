"""What a recording need not tell others: values of the environment, commands, written manifests.

Names stay, so that it can still be followed. A Plan from such a recording has *** where the
controller's own has the value; a value that the controller compares may therefore look changed.
"""

from typing import Any

import msgspec
from msgspec import Raw

REDACTED = "***"
# Lists of {name, value}, and what runs in a container or a job.
_NAMED_VALUES = ("env",)
_COMMANDS = ("command", "args", "setupCommand")
# kubectl's copy of the whole manifest holds all of these once more.
_MANIFEST = "kubectl.kubernetes.io/last-applied-configuration"


def redacted(text: bytes) -> Raw:
    """The same JSON with REDACTED for such values. Raises ValueError if it is not JSON."""
    return Raw(msgspec.json.encode(_cleaned(msgspec.json.decode(text))))


def _cleaned(value: Any) -> Any:  # noqa: ANN401 any JSON
    if isinstance(value, list):
        return [_cleaned(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: _entry(key, inner) for key, inner in value.items()}


def _entry(key: str, value: Any) -> Any:  # noqa: ANN401 any JSON
    if key == _MANIFEST:
        return REDACTED
    if key in _NAMED_VALUES and isinstance(value, list):
        return [_variable(item) for item in value]
    if key in _COMMANDS and isinstance(value, str | list):
        return REDACTED if isinstance(value, str) else [REDACTED]
    return _cleaned(value)


def _variable(entry: Any) -> Any:  # noqa: ANN401 any JSON
    if isinstance(entry, dict) and "value" in entry:
        return {**entry, "value": REDACTED}
    return entry
