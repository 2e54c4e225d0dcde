"""The published name of the image is in every file that names it."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from pages import ROOT
from torchrun_release import kubernetes
from torchrun_release.errors import ReleaseError

REGISTRY = "registry.example.com:5000/team"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    # Other processes write caches of bytecode meanwhile.
    caches = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "manifests", tmp_path / "manifests", symlinks=True, ignore=caches)
    return tmp_path


def test_every_file_names_the_published_image(source: Path) -> None:
    name = kubernetes.name_image(source, REGISTRY)
    assert name == f"{REGISTRY}/torchrun-controller"
    chart = source / kubernetes.CHART
    assert yaml.safe_load((chart / "values.yaml").read_text())["image"]["repository"] == name
    schema = json.loads((chart / "values.schema.json").read_text())
    assert schema["properties"]["image"]["properties"]["repository"]["default"] == name
    settings = schema["properties"]["settings"]["properties"]
    assert settings["leaseName"]["default"] == "torchrun-controller"
    (image,) = yaml.safe_load((source / "manifests/kustomization.yaml").read_text())["images"]
    assert (image["name"], image["newName"]) == ("torchrun-controller", name)


def test_a_file_with_another_name_is_refused(source: Path) -> None:
    kubernetes.name_image(source, REGISTRY)
    with pytest.raises(ReleaseError, match=r"manifests/kustomization\.yaml does not have"):
        kubernetes.name_image(source, REGISTRY)


def test_the_output_of_a_program_that_fails_is_in_the_error() -> None:
    with pytest.raises(ReleaseError, match=r"`sh -c .*failed:\nno such chart"):
        kubernetes.run(["sh", "-c", "echo no such chart >&2; exit 3"])
