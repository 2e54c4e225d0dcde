"""OOM kills in this container. A rank that the kernel kills for memory reports nothing itself.

The kubelet reports OOMKilled only for pid 1, which is the launcher, not a rank.
"""

from __future__ import annotations

import re

# Of cgroup v2 and v1, as a container sees its own.
_FILES = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")
_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def oom_kills(files: tuple[str, ...] = _FILES) -> int:
    """Number of processes that the kernel killed for memory so far; 0 if it is unknown."""
    for path in files:
        try:
            with open(path) as file:
                match = _KILLS.search(file.read())
        except OSError:
            continue
        if match:
            return int(match.group(1))
    return 0
