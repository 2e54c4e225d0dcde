"""The objects of the chart and of the manifests, rendered by helm and kustomize without a cluster."""

import subprocess
from pathlib import Path
from typing import Any, cast

import yaml

from torchrun_cluster import binaries

MANIFESTS = Path(__file__).parents[2] / "manifests"
CHART = MANIFESTS / "helm" / "torchrun-controller"
RELEASE = "torchrun-controller"
KUBERNETES = "1.35.0"
HELMS_OWN = {
    "helm.sh/chart",
    "helm.sh/resource-policy",
    "app.kubernetes.io/instance",
    "app.kubernetes.io/managed-by",
    "app.kubernetes.io/version",
}
"""Labels and annotations that say how an object was installed."""

Object = dict[str, Any]
Objects = dict[tuple[str, str, str], Object]
"""By kind, namespace and name."""


def helm(*arguments: str, kubeconfig: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run helm without a kubeconfig, so it cannot reach a cluster."""
    program = binaries.ensure(["helm"])["helm"]
    options = (f"--kubeconfig={kubeconfig or '/dev/null'}",)
    return subprocess.run(
        [program, *arguments, *options], capture_output=True, text=True, timeout=120, check=False
    )


def template(
    *arguments: str,
    namespace: str = "torchrun-system",
    chart: Path = CHART,
    release: str = RELEASE,
) -> Objects:
    """The rendered chart. Fails the test with the output of helm."""
    version = f"--kube-version={KUBERNETES}"
    ended = helm("template", release, str(chart), "-n", namespace, version, *arguments)
    assert ended.returncode == 0, ended.stderr
    return objects(ended.stdout)


def kustomize(folder: str) -> Objects:
    """The output of kubectl kustomize for a folder of the manifests."""
    kubectl = binaries.ensure(["kubectl"])["kubectl"]
    ended = subprocess.run(
        [kubectl, "kustomize", str(MANIFESTS / folder)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return objects(ended.stdout)


def objects(text: str) -> Objects:
    """The objects of several YAML documents, without duplicates."""
    by_name: Objects = {}
    for item in yaml.safe_load_all(text):
        if item is not None:
            meta = item["metadata"]
            key = (item["kind"], meta.get("namespace", ""), meta["name"])
            assert key not in by_name, key
            by_name[key] = item
    return by_name


def without_helms_own(value: object) -> object:
    """The value without labels and annotations of Helm, and without maps that become empty."""
    if isinstance(value, list):
        return [without_helms_own(item) for item in cast(list[object], value)]
    if not isinstance(value, dict):
        return value
    others = {
        name: without_helms_own(item)
        for name, item in cast(dict[str, object], value).items()
        if name not in HELMS_OWN
    }
    return {
        name: item
        for name, item in others.items()
        if not (name in ("labels", "annotations") and item == {})
    }
