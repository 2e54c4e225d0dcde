"""OOM kills in this container. A rank that the kernel kills reports nothing.

The kubelet reports OOMKilled only for pid 1, which is the launcher, not a rank.
"""

from __future__ import annotations

import re

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
