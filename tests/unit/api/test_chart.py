"""The values of the chart are documented, and its settings are those of the controller."""

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import torchrun_sdk
from torchrun_controller.settings import OPTIONS

ROOT = Path(__file__).parents[3]
CHART = ROOT / "manifests" / "helm" / "torchrun-controller"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
THE_CHARTS_OWN = {
    *("runtime_image", "progress_url", "namespace", "lease_namespace"),
    *("kubeconfig", "context", "listen_address", "listen_port", "progress_port"),
}
"""Settings that the chart makes itself, or that have one right value in a pod of its making."""


def described(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for name, node in schema.get("properties", {}).items():
        yield f"{path}.{name}", node
        yield from described(node, f"{path}.{name}")


def at(values: Any, path: str) -> Any:
    for name in path.split(".")[1:]:
        values = values[name]
    return values


NODES = dict(described(SCHEMA))


def test_every_value_is_in_the_schema() -> None:
    assert set(VALUES) | {"global"} == set(SCHEMA["properties"])
    for name in (
        "image",
        "crds",
        "rbac",
        "serviceAccount",
        "podDisruptionBudget",
        "networkPolicy",
        "monitoring",
    ):
        assert set(VALUES[name]) == set(SCHEMA["properties"][name]["properties"])


@pytest.mark.parametrize("path", NODES)
def test_it_is_described_and_bounded(path: str) -> None:
    node = NODES[path]
    if path.count(".") > 1 and path.startswith(".resources"):
        return  # fields of the Pod
    assert node["description"]
    assert {"type", "enum", "anyOf"} & set(node)


@pytest.mark.parametrize("path", [path for path, node in NODES.items() if "default" in node])
def test_its_default_is_the_one_in_values(path: str) -> None:
    if not path.startswith(".settings."):
        assert at(VALUES, path) == NODES[path]["default"]


def test_the_settings_are_those_of_the_controller() -> None:
    """Each setting of the controller is in values.schema.json, or the chart sets it itself."""
    options = {option.name: option for option in OPTIONS}
    ours = SCHEMA["properties"]["settings"]["properties"]
    snake = {re.sub("([A-Z])", r"_\1", name).lower(): node for name, node in ours.items()}
    assert set(snake) == set(options) - THE_CHARTS_OWN
    for name, node in snake.items():
        option = options[name]
        default = str(node["default"])
        assert option.default == (default.lower() if node.get("type") == "boolean" else default)
        for word in node.get("enum", ()):
            option.parse(word)


def test_all_files_have_the_same_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == version
    assert f"ARG VERSION={version}\n" in (ROOT / "Dockerfile").read_text()
    assert f"torchrun-controller:{version}\n" in (ROOT / "Makefile").read_text()
    for package in ("plugin", "sdk"):
        project = tomllib.loads((ROOT / package / "pyproject.toml").read_text())["project"]
        assert project["version"] == version
    assert torchrun_sdk.__version__ == version
    deployment = (ROOT / "manifests" / "controller" / "deployment.yaml").read_text()
    assert re.findall(r"torchrun-controller:(\S+)", deployment) == [version] * 2
    for folder in ("", "overlays/single-namespace"):
        path = ROOT / "manifests" / folder / "kustomization.yaml"
        (image,) = yaml.safe_load(path.read_text())["images"]
        assert image["newTag"] == version


def test_the_dockerfile_is_for_every_builder() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert not re.search(r"(?m)^# *syntax=|<<|--mount|--link|--chmod|--network|--security", text)
    assert re.search(r"(?m)^USER 65532:65532$", text)
    installs = re.findall(r"pip install .*", text)
    assert all("--require-hashes" in line or "--no-index" in line for line in installs)


def test_the_makefile_sends_what_the_image_needs() -> None:
    named = re.search(r"(?m)^IMAGE_INPUTS := (.*)$", (ROOT / "Makefile").read_text())
    assert named
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert named[1].split() == [line[1:] for line in ignored if line.startswith("!")]
