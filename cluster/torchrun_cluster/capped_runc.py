"""runc for a machine whose root lacks some capabilities: run as a program, in the place of runc.

A privileged container asks for every capability, and the kernel refuses those that are not in the
bounding set. This removes them from the container's configuration (`--bundle`, of create and run)
and from that of a process (`--process`, of exec), and executes runc with the same arguments.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

# By number, from linux/capability.h.
NAMES = (
    *("CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID"),
    *("SETPCAP", "LINUX_IMMUTABLE", "NET_BIND_SERVICE", "NET_BROADCAST", "NET_ADMIN", "NET_RAW"),
    *("IPC_LOCK", "IPC_OWNER", "SYS_MODULE", "SYS_RAWIO", "SYS_CHROOT", "SYS_PTRACE", "SYS_PACCT"),
    *("SYS_ADMIN", "SYS_BOOT", "SYS_NICE", "SYS_RESOURCE", "SYS_TIME", "SYS_TTY_CONFIG", "MKNOD"),
    *("LEASE", "AUDIT_WRITE", "AUDIT_CONTROL", "SETFCAP", "MAC_OVERRIDE", "MAC_ADMIN", "SYSLOG"),
    *("WAKE_ALARM", "BLOCK_SUSPEND", "AUDIT_READ", "PERFMON", "BPF", "CHECKPOINT_RESTORE"),
)


def missing_capabilities(status: str) -> frozenset[str]:
    """Names, such as CAP_SYS_RESOURCE, that the bounding set lacks; from /proc/PID/status."""
    field = next(line for line in status.splitlines() if line.startswith("CapBnd:"))
    bounding = int(field.split()[1], 16)
    absent = (name for number, name in enumerate(NAMES) if not bounding >> number & 1)
    return frozenset(f"CAP_{name}" for name in absent)


def without(process: dict[str, object], missing: frozenset[str]) -> dict[str, object]:
    """An OCI `process` whose five sets of capabilities have none of `missing`."""
    sets = process.get("capabilities")
    if not isinstance(sets, dict):
        return process
    remaining = {
        name: [capability for capability in capabilities if capability not in missing]
        for name, capabilities in sets.items()
    }
    return {**process, "capabilities": remaining}


def edit(arguments: Sequence[str], missing: frozenset[str]) -> None:
    """Edit the files that a command line of runc names by --bundle and --process."""
    for flag, value in pairwise(arguments):
        if flag in ("--bundle", "-b"):
            file = Path(value) / "config.json"
            spec = json.loads(file.read_text())
            file.write_text(json.dumps({**spec, "process": without(spec["process"], missing)}))
        elif flag in ("--process", "-p"):
            file = Path(value)
            file.write_text(json.dumps(without(json.loads(file.read_text()), missing)))


if __name__ == "__main__":
    edit(sys.argv[2:], missing_capabilities(Path("/proc/self/status").read_text()))
    os.execv(sys.argv[1], sys.argv[1:])  # noqa: S606  the purpose of this program
