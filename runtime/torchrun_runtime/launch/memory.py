"""OOM kills in this container. A rank that the kernel kills reports nothing.

The kubelet reports OOMKilled only for pid 1, which is the launcher, not a rank.
"""

from __future__ import annotations

import re
import time
from typing import Callable

from .supervise import StopRequest

# Files of cgroup v2 and v1, as mounted in a container.
_FILES = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")
_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def oom_kills(files: tuple[str, ...] = _FILES) -> int:
    """Number of processes that the kernel has killed for memory; 0 if unknown."""
    for path in files:
        try:
            with open(path) as file:
                match = _KILLS.search(file.read())
        except OSError:
            continue
        if match:
            return int(match.group(1))
    return 0


class OomWatchdog:
    """Notes when the kernel kills a process of this container for memory. It requests no stop."""

    def __init__(self, count: Callable[[], int] = oom_kills) -> None:
        self._count = count
        self._kills = count()
        self._newest: float | None = None

    def check(self) -> StopRequest | None:
        """Note the time of new kills. Call it about every second."""
        kills = self._count()
        if kills > self._kills:
            self._kills, self._newest = kills, time.monotonic()
        return None

    def on_stop(self, *, leaving: bool) -> None:
        """Note kills before the stop."""
        self.check()

    def has_killed(self, seconds: float = float("inf")) -> bool:
        """Whether there was a kill within the last seconds."""
        self.check()
        return self._newest is not None and time.monotonic() - self._newest < seconds
