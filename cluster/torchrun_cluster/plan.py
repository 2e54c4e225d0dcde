"""What a cluster with the images of the examples takes, before anything is built."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import binaries, packages, tools
from .engine import Engine, choose, docker_answers, look_at_machine
from .errors import ClusterError
from .kind import IMAGE_SETTING
from .places import cache_home

GIGABYTES = 15
"""Free disk for a first run: images as archives, in the store of their builder, in the node."""
MINUTES: Mapping[str, int] = {"kind": 1, "kubectl": 2, "kubernetes": 10, "torch": 5}
"""Of a first run, on two cores."""
IMAGE_MINUTES = 2
KIND_IMAGE_MINUTES = 3
START_MINUTES = 2
DOCKER_MISSING = (
    "a Docker engine: `docker version` fails. Start it, or set CLUSTER=local (as root) or"
    " CLUSTER=current"
)


@dataclass(frozen=True)
class Step:
    """One line of a plan; `minutes` is 0 for what an earlier run has kept."""

    title: str
    text: str
    minutes: int = 0


@dataclass(frozen=True)
class Plan:
    """What is done, and what has to be installed first; with the latter, nothing is done."""

    steps: Sequence[Step]
    missing: Sequence[str]

    def lines(self) -> list[str]:
        """As it is printed."""
        lines = [
            f"  {step.title:10} {step.text}{f', about {step.minutes} min' if step.minutes else ''}"
            for step in self.steps
        ]
        total = sum(step.minutes for step in self.steps)
        if self.missing:
            return [*lines, *(f"missing: {text}" for text in self.missing)]
        return [*lines, f"  {'in all':10} about {total} min on two cores"]


def plan(environment: Mapping[str, str] = os.environ) -> Plan:
    """The plan for this machine. Raises ClusterError when the user has to choose a cluster."""
    engine = choose(look_at_machine(environment))
    if engine is Engine.CURRENT:
        needed = [
            name for name in ("CONTROLLER_IMAGE", "TRAINER_IMAGE") if not environment.get(name)
        ]
        missing = [f"{name}: an image that your nodes can pull" for name in needed]
        return Plan([Step("cluster", "the current one of your kubeconfig", 1)], missing)
    steps, missing = _kind(environment) if engine is Engine.KIND else _local()
    builder = "Docker" if engine is Engine.KIND or docker_answers() else "buildah"
    steps.append(_image("controller", "torchrun-controller", IMAGE_MINUTES, builder))
    steps.append(_image("PyTorch", "torchrun-torch-latest", MINUTES["torch"], builder))
    steps.append(Step("start", "of the cluster, the controller and a run", START_MINUTES))
    if (free := _free_gigabytes()) < GIGABYTES and any("build" in step.text for step in steps):
        missing.append(f"{GIGABYTES} GB of free disk for {cache_home()}: it has {free} GB")
    return Plan(steps, missing)


def _kind(environment: Mapping[str, str]) -> tuple[list[Step], list[str]]:
    version = _docker_version()
    missing = [] if version else [DOCKER_MISSING]
    image = environment.get(IMAGE_SETTING)
    node = f"with the node image {image}" if image else "pulls kindest/node from its registry"
    minutes = 0 if image else KIND_IMAGE_MINUTES
    steps = [Step("cluster", f"kind on Docker {version or '(none)'}, {node}", minutes)]
    for name in ("kind", "kubectl"):
        if path := tools.on_path(name):
            steps.append(Step(name, str(path)))
        elif reason := tools.missing(name):
            missing.append(reason)
        else:
            steps.append(_program(name, [name], MINUTES[name]))
    return steps, missing


def _local() -> tuple[list[Step], list[str]]:
    steps = [Step("cluster", "a local one on this machine")]
    missing: list[str] = []
    if os.geteuid() != 0:
        missing.append("root: run it with sudo, or start Docker for a kind cluster")
    wanted = {**packages.NODE, **packages.IMAGES}
    if absent := packages.missing(wanted):
        if packages.find("apt-get"):
            steps.append(Step("packages", f"apt-get installs {' '.join(absent)}", 1))
        else:
            missing.append(f"the programs of Debian's packages {' '.join(absent)}")
    if shutil.which("go"):
        steps.append(_program("Kubernetes", binaries.NODE, MINUTES["kubernetes"]))
    else:
        missing.append("Go 1.26 or later (https://go.dev/dl), which builds Kubernetes")
    return steps, missing


def _program(title: str, names: Sequence[str], minutes: int) -> Step:
    if binaries.absent(names):
        return Step(title, "to build with Go", minutes)
    return Step(title, "kept from an earlier run")


def _image(title: str, prefix: str, minutes: int, builder: str) -> Step:
    archives = cache_home().joinpath("images").glob(f"*{prefix}*/image.tar")
    if any(archives):
        return Step(title, f"image kept from an earlier run; {builder} builds it after changes")
    return Step(title, f"image to build with {builder}", minutes)


def _docker_version() -> str:
    try:
        result = subprocess.run(
            ["docker", "version", "--format", "{{.Server.Version}}"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if result.returncode else result.stdout.strip()


def _free_gigabytes() -> int:
    place: Path = cache_home()
    while not place.exists():
        place = place.parent
    return int(shutil.disk_usage(place).free / 1e9)


def say_plan() -> int:
    """Print the plan; returns 1 where something is missing."""
    current = plan()
    print("\n".join(current.lines()))
    if current.missing:
        raise ClusterError("nothing was built or started; see what is missing above")
    return 0
