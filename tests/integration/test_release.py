"""The files of a release, apart from the image: content, and the same bytes from two builds."""

import os
import platform
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

from integration.charts import kustomize, objects, template
from release_checkout import copy_checkout
from torchrun_cluster import binaries
from torchrun_release import archives, kubernetes, python, source, versions
from torchrun_release.python import Builder, Platform

REGISTRY = "registry.example.com:5000/team"
URL = "https://releases.example.com/x"
IMAGE = f"{REGISTRY}/torchrun-controller"
ARCH = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
(THIS,) = (one for one in python.PLATFORMS if (one.os, one.arch) == (sys.platform, ARCH))


class Exported:
    """The commit of a copy of this checkout, exported, with the published name of the image."""

    def __init__(self, folder: Path) -> None:
        checkout, self.source = folder / "checkout", folder / "source"
        copy_checkout(checkout)
        self.version = versions.current(checkout)
        self.commit = source.find_commit(checkout, self.version)
        source.export(checkout, self.commit, self.source)
        kubernetes.name_image(self.source, REGISTRY)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return Exported(tmp_path_factory.mktemp("exported"))


@pytest.fixture
def twice(exported: Exported, tmp_path: Path) -> tuple[Exported, Exported]:
    """Two copies of the same commit in different folders."""
    (tmp_path / "elsewhere").mkdir()
    return exported, Exported(tmp_path / "elsewhere")


def test_install_yaml_has_the_objects_of_the_manifests(exported: Exported, tmp_path: Path) -> None:
    kubernetes.write_install(exported.source, tmp_path)
    text = (tmp_path / kubernetes.INSTALL).read_text()
    assert text.count(f"{IMAGE}:{exported.version}") == 2  # the controller's, and of its jobs' pods
    assert objects(text.replace(IMAGE, "torchrun-controller")) == kustomize("")
    kinds = [item["kind"] for item in yaml.safe_load_all(text)]
    assert kinds.index("Namespace") < kinds.index("CustomResourceDefinition")
    assert kinds.count("CustomResourceDefinition") == 2
    last = len(kinds) - kinds[::-1].index("CustomResourceDefinition")
    assert last < kinds.index("Deployment")


def test_the_chart_has_files_and_the_published_image(exported: Exported, tmp_path: Path) -> None:
    kubernetes.write_chart(exported.source, tmp_path, exported.commit.epoch)
    chart = tmp_path / f"torchrun-controller-{exported.version}.tgz"
    with tarfile.open(chart) as tar:
        assert {member.type for member in tar} == {tarfile.REGTYPE}
        assert {member.mtime for member in tar} == {exported.commit.epoch}
    assert template(chart=chart) == template(f"--set=image.repository={IMAGE}")


def test_two_builds_of_the_manifests_and_the_chart_agree(
    twice: tuple[Exported, Exported], tmp_path: Path
) -> None:
    for number, one in enumerate(twice):
        target = tmp_path / str(number)
        target.mkdir()
        kubernetes.write_install(one.source, target)
        kubernetes.write_chart(one.source, target, one.commit.epoch)
        archives.write_sums(target)
    first, second = ((tmp_path / name / archives.SUMS).read_text() for name in "01")
    assert first == second
    assert len(first.splitlines()) == 2


def write_packages(one: Exported, folder: Path, platforms: tuple[Platform, ...]) -> Path:
    """Write wheels and the archives of platforms, with their manifest and sums."""
    work, target = folder / "work", folder / "dist"
    work.mkdir(parents=True)
    target.mkdir()
    builder = Builder(one.source, work, one.commit.epoch)
    builder.write_wheels(target)
    for platform_ in platforms:
        builder.write_plugin(target, one.version, URL, platform_)
    archives.write_sums(target)
    return target


@pytest.mark.long
def test_two_builds_of_the_packages_agree(twice: tuple[Exported, Exported], tmp_path: Path) -> None:
    first, second = (
        write_packages(one, tmp_path / str(number), (THIS,)) for number, one in enumerate(twice)
    )
    assert (first / archives.SUMS).read_text() == (second / archives.SUMS).read_text()
    names = {path.name for path in first.iterdir()}
    version = twice[0].version
    assert names == {
        f"kubectl_torchrun-{version}-py3-none-any.whl",
        f"torchrun_sdk-{version}-py3-none-any.whl",
        python.archive_name(version, THIS),
        archives.SUMS,
    }
    with zipfile.ZipFile(first / f"kubectl_torchrun-{version}-py3-none-any.whl") as wheel:
        assert "torchrun_api/kinds/job.py" in wheel.namelist()


@pytest.mark.long
def test_krew_installs_the_plugin(exported: Exported, tmp_path: Path) -> None:
    """krew verifies manifest and digest; the program runs without any other package."""
    dist = write_packages(exported, tmp_path, python.PLATFORMS)
    python.write_manifest(dist, exported.version, "https://releases.example.com/v0")
    archive = dist / python.archive_name(exported.version, THIS)
    krew = binaries.ensure(["krew"])["krew"]
    environment = {**os.environ, "KREW_ROOT": str(tmp_path / "krew"), "KREW_NO_UPGRADE_CHECK": "1"}
    ended = subprocess.run(
        [krew, "install", f"--manifest={dist / python.MANIFEST}", f"--archive={archive}"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    program = tmp_path / "krew" / "bin" / "kubectl-torchrun"
    without_packages = f"{sys.base_prefix}/bin"
    shown = subprocess.run(
        [program, "--version"],
        env={"PATH": without_packages},
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.stdout == f"kubectl torchrun, version {exported.version}\n", shown.stderr
