"""The output of sync and serve pods: JSON lines on stdout, one termination message at the end."""

import json
import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchrun_api.json import JsonObject, JsonValue

# The kubelet keeps 4096 bytes of a termination message; escaping may double a character's size.
_MESSAGE_CHARACTERS = 1500
_RARE_SECONDS = 60.0


def now() -> str:
    """Current time, RFC 3339 in UTC."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def log(event: str, level: str = "info", /, **fields: "JsonValue") -> None:
    """Print one JSON object on a line."""
    line = json.dumps({"time": now(), "level": level, "event": event, **fields})
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class RareLog:
    """`log` at most once a minute, for what any pod of the cluster can cause."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = -math.inf

    def __call__(self, event: str, level: str = "info", /, **fields: "JsonValue") -> None:
        """Print the object, unless there was one within the last minute."""
        if self._clock() - self._last >= _RARE_SECONDS:
            self._last = self._clock()
            log(event, level, **fields)


def terminate_with(path: Path, message: "JsonObject") -> None:
    """Write the container's termination message if the kubelet has created the file for it.

    Without the file there is only the exit code.
    """
    text = message.get("message")
    if isinstance(text, str):
        message = {**message, "message": text[:_MESSAGE_CHARACTERS]}
    with suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(message, file, ensure_ascii=False)
