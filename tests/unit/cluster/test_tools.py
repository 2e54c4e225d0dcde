"""kind and kubectl of the user's PATH are used where their version fits."""

import os
from pathlib import Path

import pytest

from torchrun_cluster import tools
from torchrun_cluster.errors import ClusterError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder on PATH, so without Go."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def program(folder: Path, name: str, output: str, code: int = 0) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{output}'\nexit {code}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("output", "version"),
    [
        ("kind v0.33.0 go1.26.1 linux/amd64", (0, 33)),
        ("Client Version: v1.35.4\nKustomize Version: v5.7.1", (1, 35)),
        ("Client Version: v1.32.4-dispatcher", (1, 32)),
        ("", None),
    ],
)
def test_versions_are_read(output: str, version: tools.Version | None) -> None:
    assert tools.read_version(output) == version


@pytest.mark.parametrize(
    ("name", "output"),
    [
        ("kind", "kind v0.29.0 go1.24.2 linux/amd64"),
        ("kind", "kind v1.0.0 go1.30.0 linux/amd64"),
        ("kubectl", "Client Version: v1.{}.0".format(tools.TOOLS["kubectl"].oldest[1])),
    ],
)
def test_a_program_that_fits_is_used_without_go(folder: Path, name: str, output: str) -> None:
    path = program(folder, name, output)
    assert tools.ensure(name) == path
    assert tools.missing(name) == ""


@pytest.mark.parametrize(
    ("name", "output"),
    [
        ("kind", "kind v0.28.0 go1.24.2 linux/amd64"),
        ("kubectl", "Client Version: v1.32.4-dispatcher"),
        ("kubectl", "usage: kubectl"),
    ],
)
def test_a_program_that_does_not_fit_is_not_used(folder: Path, name: str, output: str) -> None:
    program(folder, name, output)
    assert tools.on_path(name) is None
    with pytest.raises(ClusterError, match=rf"no {name} of version .* or later on PATH.* or Go"):
        tools.ensure(name)


def test_with_go_nothing_is_missing(folder: Path) -> None:
    program(folder, "go", "go version go1.26.1 linux/amd64")
    assert tools.missing("kind") == ""


def test_a_program_that_cannot_be_executed_is_not_used(folder: Path) -> None:
    path = folder / "kind"
    path.write_bytes(b"\x00")
    os.chmod(path, 0o755)
    assert tools.on_path("kind") is None
