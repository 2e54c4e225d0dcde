"""kind and kubectl: those on PATH in a fitting version, otherwise built from pinned Go modules."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from . import binaries
from .errors import ClusterError

Version = tuple[int, int]


@dataclass(frozen=True)
class Tool:
    """The oldest version that fits, and how to ask a program on PATH for its version."""

    oldest: Version
    version_arguments: tuple[str, ...]
    page: str


TOOLS: Mapping[str, Tool] = {
    # Its default node image has the oldest release that we support.
    "kind": Tool((0, 29), ("version",), "https://kind.sigs.k8s.io/docs/user/quick-start"),
    # kubectl may be one minor release older than the API server.
    "kubectl": Tool(
        (1, int(binaries.DEFAULT_KUBERNETES.partition(".")[2]) - 1),
        ("version", "--client"),
        "https://kubernetes.io/docs/tasks/tools",
    ),
}


def on_path(name: str) -> Path | None:
    """The program on PATH, if its version fits."""
    tool, path = TOOLS[name], shutil.which(name)
    if not path:
        return None
    try:
        result = subprocess.run(
            [path, *tool.version_arguments],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    version = read_version(result.stdout)
    return Path(path) if version and version >= tool.oldest else None


def read_version(output: str) -> Version | None:
    """Major and minor of the first version, such as v0.33.0, in the output of a program."""
    match = re.search(r"\bv(\d+)\.(\d+)\.", output)
    return (int(match[1]), int(match[2])) if match else None


def ensure(name: str) -> Path:
    """The program on PATH, or the one of ours, built where it has to be. Raises ClusterError."""
    if path := on_path(name):
        return path
    if reason := missing(name):
        raise ClusterError(reason)
    return binaries.ensure([name])[name]


def missing(name: str) -> str:
    """What to install for this program, or "" if it is there or can be built."""
    if on_path(name) or shutil.which("go"):
        return ""
    tool = TOOLS[name]
    oldest = ".".join(map(str, tool.oldest))
    return (
        f"there is no {name} of version {oldest} or later on PATH: install it ({tool.page}), or Go"
        " 1.26 or later to build it (https://go.dev/dl)"
    )
