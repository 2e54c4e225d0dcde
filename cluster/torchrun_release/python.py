"""What a user's machine gets: wheels, and archives of the plugin with all it needs for krew."""

from __future__ import annotations

import os
import venv
from dataclasses import dataclass
from pathlib import Path

from torchrun_cluster.artefacts import sha256_of

from . import archives
from .archives import File
from .kubernetes import run

PACKAGES = ("plugin", "sdk")
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
"""Compiled modules of the plugin's archives are for these."""
LOCK = Path("requirements", "plugin.txt")
MANIFEST = "krew.yaml"
PROGRAM = "kubectl-torchrun"


@dataclass(frozen=True)
class Platform:
    """A platform as krew names it, and the wheels that run on it."""

    os: str
    arch: str
    wheels: str


PLATFORMS = (
    Platform("darwin", "amd64", "macosx_11_0_x86_64"),
    Platform("darwin", "arm64", "macosx_11_0_arm64"),
    Platform("linux", "amd64", "manylinux2014_x86_64"),
    Platform("linux", "arm64", "manylinux2014_aarch64"),
)

LAUNCHER = """\
#!/usr/bin/env python3
import os
import sys

if not (3, 11) <= sys.version_info[:2] <= (3, 14):
    sys.exit("Error: kubectl torchrun needs a python3 between 3.11 and 3.14 on PATH, not "
             + sys.version.split()[0] + "\\nWith pipx: pipx install {wheel}")
sys.path.insert(0, os.path.join(os.path.dirname(os.path.realpath(__file__)), "lib"))
from kubectl_torchrun.__main__ import main

sys.exit(main())
"""

PLUGIN = """\
# kubectl krew install --manifest-url={url}/krew.yaml
apiVersion: krew.googlecontainertools.github.com/v1alpha2
kind: Plugin
metadata:
  name: torchrun
spec:
  version: v{version}
  homepage: {url}
  shortDescription: Run a local directory with torchrun on many nodes
  description: |
    Uploads the current directory to a cluster, runs a command in it with torchrun on one or many
    nodes, and shows phases, reasons and the logs of all ranks in the terminal.
  caveats: |
    Needs Python 3.11 to 3.14 as python3 on PATH, and the Torchrun Controller in the cluster:
      kubectl torchrun doctor
  platforms:
"""

PLUGIN_PLATFORM = """\
    - selector:
        matchLabels:
          os: {os}
          arch: {arch}
      uri: {url}/{archive}
      sha256: "{digest}"
      bin: kubectl-torchrun
"""


class Builder:
    """pip with the locked build tools, in an environment of its own below `folder`."""

    def __init__(self, source: Path, folder: Path, epoch: int) -> None:
        self._source, self._folder, self._epoch = source, folder, epoch
        venv.create(folder / "venv", with_pip=True)
        lock = source / "requirements" / "build.txt"
        self._pip("install", "--require-hashes", "-r", str(lock))

    def write_wheels(self, target: Path) -> None:
        """Write the wheels of the plugin, which contains the API types, and of the SDK."""
        sources = [str(self._source / package) for package in PACKAGES]
        self._pip("wheel", "--no-deps", "--no-build-isolation", "-w", str(target), *sources)

    def write_plugin(self, target: Path, version: str, url: str, platform: Platform) -> None:
        """Write the archive of a platform. The wheel of the plugin is in `target`.

        `url` is the folder of the published files.
        """
        wheels = self._folder / f"{platform.os}-{platform.arch}"
        for python in PYTHONS:
            self._pip(
                *("download", "--no-deps", "--only-binary=:all:", "--require-hashes"),
                *("-r", str(self._source / LOCK), "-d", str(wheels)),
                *(f"--python-version={python}", f"--platform={platform.wheels}"),
            )
        own = target / wheel_name(version)
        packages = archives.read_wheels([*wheels.glob("*.whl"), own])
        files = {f"lib/{name}": file for name, file in packages.items()}
        files[PROGRAM] = File(launcher(version, url).encode(), executable=True)
        files["LICENSE"] = File((self._source / "LICENSE").read_bytes())
        archives.write_tar(target / archive_name(version, platform), files, self._epoch)

    def _pip(self, command: str, *arguments: str) -> None:
        python = self._folder / "venv" / "bin" / "python"
        environment = {**os.environ, "SOURCE_DATE_EPOCH": str(self._epoch)}
        options = ("--quiet", "--disable-pip-version-check", "--no-cache-dir")
        run([str(python), "-m", "pip", command, *options, *arguments], environment)


def wheel_name(version: str) -> str:
    """The file name of the plugin's wheel."""
    return f"kubectl_torchrun-{version}-py3-none-any.whl"


def launcher(version: str, url: str) -> str:
    """The program in the plugin's archives; `url` is the folder of the published files."""
    return LAUNCHER.format(wheel=f"{url}/{wheel_name(version)}")


def archive_name(version: str, platform: Platform) -> str:
    """The file name of the plugin's archive for a platform."""
    return f"{PROGRAM}-{version}-{platform.os}-{platform.arch}.tar.gz"


def krew_manifest(version: str, url: str, digests: dict[Platform, str]) -> str:
    """The manifest of the plugin for krew; `url` is the folder of the published files."""
    blocks = [
        PLUGIN_PLATFORM.format(
            os=platform.os,
            arch=platform.arch,
            url=url,
            archive=archive_name(version, platform),
            digest=digest,
        )
        for platform, digest in digests.items()
    ]
    return PLUGIN.format(version=version, url=url) + "".join(blocks)


def write_manifest(target: Path, version: str, url: str) -> None:
    """Write krew.yaml for the archives in the folder."""
    digests = {
        platform: sha256_of(target / archive_name(version, platform)) for platform in PLATFORMS
    }
    text = krew_manifest(version, url, digests)
    (target / MANIFEST).write_text(text, encoding="utf-8")
