"""What a cluster gets: install.yaml and the chart, with the published name of the image."""

from __future__ import annotations

import subprocess
from pathlib import Path

from torchrun_cluster import binaries

from . import archives
from .errors import ReleaseError

NAME = "torchrun-controller"
INSTALL = "install.yaml"
CHART = Path("manifests", "helm", NAME)
IMAGE_NAMES: tuple[tuple[Path, str], ...] = (
    (Path("manifests", "kustomization.yaml"), "newName: {}\n"),
    (CHART / "values.yaml", "repository: {}\n"),
    (CHART / "values.schema.json", '\\s]+)?$",\n          "default": "{}"\n'),
)
"""Files with the name of the image, and the text around it."""


def name_image(source: Path, registry: str) -> str:
    """Write the published name of the image into an exported commit. Returns the name."""
    name = f"{registry}/{NAME}"
    for path, template in IMAGE_NAMES:
        text = (source / path).read_text(encoding="utf-8")
        if text.count(template.format(NAME)) != 1:
            raise ReleaseError(f"{path} does not have `{template.format(NAME).strip()}` once")
        text = text.replace(template.format(NAME), template.format(name))
        (source / path).write_text(text, encoding="utf-8")
    return name


def write_install(source: Path, target: Path) -> None:
    """Write all objects of manifests/, with the CRDs, as one file for `kubectl apply`."""
    kubectl = binaries.ensure(["kubectl"])["kubectl"]
    objects = run([str(kubectl), "kustomize", str(source / "manifests")])
    heading = f"# kubectl apply --server-side -f {INSTALL}\n"
    (target / INSTALL).write_text(heading + objects, encoding="utf-8")


def write_chart(source: Path, target: Path, epoch: int) -> None:
    """Write the chart as Helm packs it, but with the time of the commit."""
    helm = binaries.ensure(["helm"])["helm"]
    run([str(helm), "package", str(source / CHART), "--destination", str(target)])
    (chart,) = target.glob("*.tgz")
    archives.write_tar(chart, archives.read_tar(chart), epoch)


def run(command: list[str], environment: dict[str, str] | None = None) -> str:
    """Run a program and return its stdout. Raises ReleaseError with its output."""
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        output = "\n".join((ended.stdout + ended.stderr).splitlines()[-25:])
        raise ReleaseError(f"`{' '.join(command)}` failed:\n{output}")
    return ended.stdout
