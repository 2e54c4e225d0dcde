"""A cgroup for each cluster and its nodes, in every hierarchy of either cgroup version."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from .errors import ClusterError

SYSTEM = "system"
"""The child cgroup with the node's own processes; kubelet puts pods into a sibling."""


def hierarchies(mountinfo: str) -> list[Path]:
    """Mount points of all cgroup hierarchies, from the text of /proc/self/mountinfo."""
    mounts: list[Path] = []
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        mounted_at = Path(before.split()[4])
        if after.split()[0] in ("cgroup", "cgroup2") and mounted_at not in mounts:
            mounts.append(mounted_at)
    return mounts


def create(name: str) -> None:
    """Create the cgroup with this path, and its child for the cluster's own processes.

    Raises ClusterError if the kernel refuses.
    """
    for folder in _mounted():
        for part in (*Path(name).parts, SYSTEM):
            if (folder / "cgroup.controllers").exists():
                _delegate_controllers(folder)
            folder /= part
            try:
                folder.mkdir(exist_ok=True)
            except OSError as error:
                raise ClusterError(f"cannot create cgroup {folder}: {error}") from error
            _inherit_cpuset(folder)


def enter_script(name: str) -> str:
    """Shell commands that move the shell which runs them into that child."""
    files = (root / name / SYSTEM / "cgroup.procs" for root in _mounted())
    return "".join(f"echo 0 > '{file}'\n" for file in files)


def remove(name: str, timeout: float = 60.0) -> None:
    """Remove the cgroup and all below it. Raises ClusterError if a process still uses it."""
    deadline = time.monotonic() + timeout
    while remaining := [root / name for root in _mounted() if (root / name).exists()]:
        for top in remaining:
            for folder, _, _ in os.walk(top, topdown=False):
                # The kernel lets go of a dead process's cgroup a moment after its end.
                with contextlib.suppress(OSError):
                    os.rmdir(folder)
        if time.monotonic() > deadline:
            raise ClusterError(f"cgroups still in use: {', '.join(map(str, remaining))}")
        time.sleep(0.02)


def _mounted() -> list[Path]:
    return hierarchies(Path("/proc/self/mountinfo").read_text())


def _inherit_cpuset(folder: Path) -> None:
    for file in ("cpuset.cpus", "cpuset.mems"):
        own = folder / file
        # Version 1 only: an empty cpuset admits no process.
        if own.exists() and not (folder / "cgroup.controllers").exists():
            own.write_text((folder.parent / file).read_text())


def _delegate_controllers(folder: Path) -> None:
    for controller in (folder / "cgroup.controllers").read_text().split():
        # What cannot be delegated is not used for pods either.
        with contextlib.suppress(OSError):
            (folder / "cgroup.subtree_control").write_text(f"+{controller}")
