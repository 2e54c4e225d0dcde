"""docs/upgrade.md claims the versions that `make test` and `make matrix` run, and no others."""

import re
import tomllib

import yaml

from pages import ROOT
from torchrun_cluster.binaries import DEFAULT_KUBERNETES

PAGE = ROOT / "docs" / "upgrade.md"
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def row(component: str) -> list[str]:
    """The cells of a component: tested versions, requirement."""
    match = re.search(rf"(?m)^\| {component} \| (.*) \| (.*) \|$", PAGE.read_text(encoding="utf-8"))
    assert match, component
    return [match[1], match[2]]


def of_make(variable: str) -> list[str]:
    match = re.search(rf"(?m)^{variable} \?= (.*)$", MAKEFILE)
    assert match, variable
    return match[1].split()


def requires_python(folder: str) -> str:
    project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))
    return str(project["project"]["requires-python"])


def test_kubernetes() -> None:
    tested, requirement = row("Kubernetes")
    assert set(re.findall(r"1\.\d+", tested)) == {DEFAULT_KUBERNETES, *of_make("RELEASES")}
    chart = ROOT / "manifests/helm/torchrun-controller/Chart.yaml"
    oldest = yaml.safe_load(chart.read_text(encoding="utf-8"))["kubeVersion"]
    assert oldest == f">={requirement.split()[-1]}.0-0"


def test_python() -> None:
    for name, folder in (("the controller", "."), ("the plugin", "plugin"), ("the SDK", "sdk")):
        tested, requirement = row(f"Python of {name}")
        assert re.findall(r"3\.\d+", tested.partition(";")[0]) == of_make("PYTHONS")
        assert requires_python(folder) == f">={requirement}"
    image = re.search(r"BASE=python:(3\.\d+)-", (ROOT / "Dockerfile").read_text(encoding="utf-8"))
    assert image
    assert f"the image has {image[1]}" in row("Python of the controller")[0]


def test_torch() -> None:
    dockerfile = (ROOT / "cluster/images/torch/Dockerfile").read_text(encoding="utf-8")
    assert row("PyTorch")[0].split()[0] in re.findall(r"ARG TORCH=(\S+)", dockerfile)
