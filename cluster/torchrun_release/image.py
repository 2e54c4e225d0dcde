"""The image of the controller as an OCI archive, and the list of what is in it."""

from __future__ import annotations

from pathlib import Path

from torchrun_cluster import images, oci

from . import archives
from .kubernetes import NAME
from .source import Commit

SBOM = "opt/torchrun/sbom.cdx.json"


def build(source: Path, version: str, name: str, commit: Commit) -> Path:
    """Build the image with buildah, on BASE_IMAGE if that is set; returns the cache's archive.

    `source` is the exported commit, `name` the image without its tag.
    """
    return images.build(
        source / "Dockerfile",
        source,
        f"{name}:{version}",
        {"VERSION": version, "REVISION": commit.revision},
        _inputs(source),
        commit.epoch,
    )


def write(built: Path, target: Path, version: str, commit: Commit) -> str:
    """Write the archive and its SBOM. Returns the digest of the image's manifest."""
    archives.write_tar(target / f"{NAME}-{version}.oci.tar", archives.read_tar(built), commit.epoch)
    (target / f"{NAME}-{version}.cdx.json").write_bytes(oci.read_file(built, SBOM))
    return oci.images_in(built)[0].digest


def _inputs(source: Path) -> list[str]:
    """What .dockerignore leaves in the build context."""
    lines = (source / ".dockerignore").read_text(encoding="utf-8").split()
    return [line[1:] for line in lines if line.startswith("!")]
