"""The output of sync and serve pods: JSON lines on stdout, one termination message at the end."""

import json
import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from torchrun_runtime.launch.output import write_lines

if TYPE_CHECKING:
    from torchrun_api.json import JsonObject, JsonValue

_KUBELET_BYTES = 4096  # what the kubelet keeps of a termination message
_MESSAGE_CHARACTERS = 1500
_RARE_SECONDS = 60.0
_STDOUT = 1
_lock = threading.Lock()


def now() -> str:
    """Current time, RFC 3339 in UTC."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def log(event: str, level: str = "info", /, **fields: "JsonValue") -> None:
    """Print one JSON object on a line; without it if nobody reads stdout for some seconds."""
    line = json.dumps({"time": now(), "level": level, "event": event, **fields})
    with _lock:  # two threads may not use the same free space of the pipe
        write_lines(_STDOUT, f"{line}\n".encode())


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
    content = _fit(message)
    with suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)


def _fit(message: "JsonObject") -> bytes:
    """Return the JSON of the message, with a shorter text if the kubelet would cut it."""
    text = message.get("message")
    length = _MESSAGE_CHARACTERS
    while True:
        short = {**message, "message": text[:length]} if isinstance(text, str) else message
        # Names of files may have bytes that are not UTF-8.
        content = json.dumps(short, ensure_ascii=False).encode("utf-8", "replace")
        if len(content) <= _KUBELET_BYTES or length <= 0:
            return content
        length -= 100
