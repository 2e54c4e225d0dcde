"""Which kind of cluster to use: a pure decision, and the probes that feed it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path

from .errors import ClusterError


class Engine(Enum):
    """The three ways to a cluster."""

    CURRENT = "current"
    KIND = "kind"
    LOCAL = "local"


@dataclass(frozen=True)
class Machine:
    """What the decision rests on."""

    asked_for: str
    """The CLUSTER variable; empty when it is not set."""
    in_ci: bool
    docker: bool
    kubeconfig: bool
    root: bool


def choose(machine: Machine) -> Engine:
    """The kind of cluster for this machine. Raises ClusterError when the user has to say.

    The local one changes the machine, so outside CI it is used only when it is asked for, or
    by root on a machine that offers nothing else.
    """
    if machine.asked_for:
        try:
            return Engine(machine.asked_for)
        except ValueError:
            raise ClusterError(
                f"CLUSTER={machine.asked_for} is invalid; use current, kind or local"
            ) from None
    if machine.docker:
        return Engine.KIND
    if machine.in_ci or (machine.root and not machine.kubeconfig):
        return Engine.LOCAL
    if machine.kubeconfig:
        raise ClusterError(
            "no Docker engine answers. Set CLUSTER=current to use the cluster of your kubeconfig,"
            " or CLUSTER=local to start one on this machine (as root)"
        )
    raise ClusterError(
        "no Docker engine answers and there is no kubeconfig. Start Docker, set CLUSTER=current"
        " and KUBECONFIG, or run this as root for a cluster on this machine"
    )


def look_at_machine(environment: Mapping[str, str] = os.environ) -> Machine:
    """Probe for Docker and a kubeconfig."""
    default = os.path.expanduser("~/.kube/config")
    files = environment.get("KUBECONFIG", default).split(os.pathsep)
    return Machine(
        asked_for=environment.get("CLUSTER", ""),
        in_ci=environment.get("CI", "").lower() == "true",
        docker=docker_answers(),
        kubeconfig=any(Path(file).is_file() for file in files if file),
        root=os.geteuid() == 0,
    )


@cache
def docker_answers() -> bool:
    """Whether a Docker engine answers within ten seconds."""
    if not shutil.which("docker"):
        return False
    try:
        result = subprocess.run(
            ["docker", "info", "--format", "{{.ServerVersion}}"],
            capture_output=True,
            timeout=10,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return result.returncode == 0
