"""Whether the kernel killed for memory in this container; a rank killed so writes nothing itself.

The kubelet says OOMKilled only of pid 1, which the launcher is and the rank is not.
"""

from __future__ import annotations

import re

# Of cgroup v2 and v1, as a container sees its own.
_FILES = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")
_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def oom_kills(files: tuple[str, ...] = _FILES) -> int:
    """Processes that the kernel has killed for memory so far; 0 where it does not say."""
    for path in files:
        try:
            with open(path) as file:
                found = _KILLS.search(file.read())
        except OSError:
            continue
        if found:
            return int(found.group(1))
    return 0
