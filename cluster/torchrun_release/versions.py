"""The version of the project, and every file that has it."""

from __future__ import annotations

import re
from pathlib import Path

from .errors import ReleaseError

VERSION = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)")
"""Valid for Helm, krew (SemVer) and pip (PEP 440): these differ for pre-releases."""

PLACES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("pyproject.toml", ('\nversion = "{}"\n',)),
    ("plugin/pyproject.toml", ('\nversion = "{}"\n',)),
    ("sdk/pyproject.toml", ('\nversion = "{}"\n',)),
    ("sdk/torchrun_sdk/__init__.py", ('\n__version__ = "{}"\n',)),
    ("Dockerfile", ("\nARG VERSION={}\n",)),
    ("Makefile", ("torchrun-controller:{}\n",)),
    (
        "manifests/helm/torchrun-controller/Chart.yaml",
        ("\nversion: {}\n", "\nappVersion: {}\n"),
    ),
    ("manifests/kustomization.yaml", ("newTag: {}\n",)),
    ("manifests/overlays/single-namespace/kustomization.yaml", ("newTag: {}\n",)),
    ("manifests/controller/deployment.yaml", ("torchrun-controller:{}\n",)),
    ("examples/demo.py", ('torchrun-controller:{}"',)),
    ("tests/e2e/cluster.py", ('torchrun-controller:{}"',)),
    (".vscode/launch.json", ('torchrun-controller:{}"',)),
    ("README.md", ("$IMAGE:{} ",)),
    ("docs/install.md", ("torchrun-controller:{}", "torchrun-controller-{}.")),
    ("docs/upgrade.md", ("torchrun-controller-{}.tgz",)),
)
"""Files, and the text around each version in them."""


def check(version: str) -> str:
    """The version itself. Raises ReleaseError for anything but numbers as in 0.2.0."""
    if not VERSION.fullmatch(version):
        raise ReleaseError(
            f"{version!r} is no version: set VERSION to three numbers, for example VERSION=0.2.0"
        )
    return version


def current(root: Path) -> str:
    """The version in pyproject.toml. Raises ReleaseError where it has none."""
    text = (root / "pyproject.toml").read_text(encoding="utf-8")
    if not (found := re.search(r'(?m)^version = "(.+)"$', text)):
        raise ReleaseError("pyproject.toml has no line `version = ...`")
    return found[1]


def differing(root: Path, version: str) -> list[str]:
    """The files that do not have this version in each of their places."""
    return [
        path
        for path, templates in PLACES
        if not _has_all((root / path).read_text(encoding="utf-8"), templates, version)
    ]


def set_version(root: Path, version: str) -> list[str]:
    """Write the version into every file; returns the files that changed.

    Raises ReleaseError, before it writes anything, if a file lacks the present version.
    """
    before = current(root)
    if lacking := differing(root, before):
        raise ReleaseError(f"set the version {before} in {', '.join(lacking)} first")
    if check(version) == before:
        return []
    for path, templates in PLACES:
        text = (root / path).read_text(encoding="utf-8")
        for template in templates:
            text = text.replace(template.format(before), template.format(version))
        (root / path).write_text(text, encoding="utf-8")
    return [path for path, _ in PLACES]


def _has_all(text: str, templates: tuple[str, ...], version: str) -> bool:
    return all(template.format(version) in text for template in templates)
