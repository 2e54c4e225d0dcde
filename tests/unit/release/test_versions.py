"""The version is set in every file, as each file's own readers see it."""

import re
import shutil
import tomllib
from pathlib import Path

import pytest
import yaml

from pages import ROOT
from torchrun_release import versions
from torchrun_release.errors import ReleaseError

NEW = "12.34.56"
CHART = "manifests/helm/torchrun-controller/Chart.yaml"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name, _ in versions.PLACES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize("version", ["0.2", "v0.2.0", "0.2.0-rc.1", "0.2.0rc1", "01.2.3", ""])
def test_only_three_numbers_are_a_version(version: str) -> None:
    with pytest.raises(ReleaseError, match=r"VERSION=0\.2\.0"):
        versions.check(version)


def test_this_checkout_has_one_version() -> None:
    assert versions.differing(ROOT, versions.current(ROOT)) == []


def test_it_is_set_for_every_reader(checkout: Path) -> None:
    old = versions.current(checkout)
    assert versions.set_version(checkout, NEW) == [name for name, _ in versions.PLACES]
    assert versions.differing(checkout, NEW) == []
    for name in ("pyproject.toml", "plugin/pyproject.toml", "sdk/pyproject.toml"):
        assert tomllib.loads((checkout / name).read_text())["project"]["version"] == NEW
    chart = yaml.safe_load((checkout / CHART).read_text())
    assert (chart["version"], chart["appVersion"]) == (NEW, NEW)
    deployment = (checkout / "manifests/controller/deployment.yaml").read_text()
    assert re.findall(r"torchrun-controller:([\d.]+)", deployment) == [NEW, NEW]
    for name, _ in versions.PLACES:
        assert f"torchrun-controller:{old}" not in (checkout / name).read_text()


def test_no_other_file_names_an_image_with_the_version() -> None:
    image = f"torchrun-controller:{versions.current(ROOT)}"
    known = {name for name, _ in versions.PLACES}
    suffixes = {".py", ".yaml", ".json", ".md", ".toml", ""}
    folders = ("docs", "examples", "manifests", "plugin", "sdk", "tests", ".vscode", ".github")
    files = [*ROOT.glob("[!.]*"), *(path for name in folders for path in (ROOT / name).rglob("*"))]
    naming = {
        str(path.relative_to(ROOT))
        for path in files
        if path.is_file() and path.suffix in suffixes and image in path.read_text("utf-8")
    }
    assert naming <= known


def test_the_same_version_changes_nothing(checkout: Path) -> None:
    assert versions.set_version(checkout, versions.current(checkout)) == []


def test_nothing_is_written_if_a_file_has_another_version(checkout: Path) -> None:
    before = versions.current(checkout)
    path = checkout / "Dockerfile"
    path.write_text(path.read_text().replace(f"ARG VERSION={before}", "ARG VERSION=9.9.9"))
    with pytest.raises(ReleaseError, match="in Dockerfile first"):
        versions.set_version(checkout, NEW)
    assert versions.current(checkout) == before
    assert versions.differing(checkout, before) == ["Dockerfile"]


def test_a_wrong_version_is_refused_before_anything_is_written(checkout: Path) -> None:
    before = versions.current(checkout)
    with pytest.raises(ReleaseError):
        versions.set_version(checkout, "latest")
    assert versions.differing(checkout, before) == []
