"""Versions of the cluster and of the controller, and gang schedulers by name."""

import re
from pathlib import Path

import pytest

from kubectl_torchrun.doctor.controller import check_skew
from kubectl_torchrun.doctor.installation import OLDEST_MINOR, check_schedulers, check_version
from torchrun_api.json import JsonObject

from .played import groups, items, named, only, play, queue, verdicts

CHART = Path(__file__).parents[4] / "manifests" / "helm" / "torchrun-controller" / "Chart.yaml"


@pytest.mark.parametrize(
    ("version", "verdict"),
    [
        ("v1.32.9", "warn"),
        ("v1.33.0", "ok"),
        ("v1.33.1-eks-1", "ok"),
        ("v1.9.0", "warn"),
        ("v2.0.0", "ok"),
        ("", "ok"),
    ],
)
def test_an_old_cluster_is_a_warning(version: str, verdict: str) -> None:
    assert verdicts(check_version(play(version={"gitVersion": version}))) == [verdict]


def test_the_oldest_version_is_that_of_the_chart() -> None:
    oldest = re.search(r'kubeVersion: ">=1\.(\d+)', CHART.read_text(encoding="utf-8"))
    assert oldest
    assert int(oldest[1]) == OLDEST_MINOR


@pytest.mark.parametrize(
    ("gang", "served", "failed"),
    [
        ("kueue", "apps", True),
        ("kueue", "kueue.x-k8s.io", False),
        ("coscheduling", "apps", True),
        ("native", "apps", False),
        ("none", "apps", False),
    ],
)
def test_the_gang_scheduler_of_a_queue_is_installed(gang: str, served: str, failed: bool) -> None:
    scheduling: JsonObject = {"gang": gang}
    snapshot = play(groups=groups(served), queues=items(queue(scheduling=scheduling)))
    findings = check_schedulers(snapshot)
    assert ("fail" in verdicts(findings)) is failed
    if failed:
        assert "GangSchedulerMissing" in only(findings, "fail").text


def deployment(image: str, label: str = "") -> JsonObject:
    containers: JsonObject = {"containers": [{"image": image}]}
    labels: JsonObject = {"app.kubernetes.io/version": label} if label else {}
    return named("c", labels=labels, spec={"template": {"spec": containers}})


@pytest.mark.parametrize(
    ("image", "label", "plugin", "older"),
    [
        ("r/c:0.1.0", "", "0.1.3", ""),
        ("r/c:0.2.0", "", "0.1.0 (checkout)", "plugin"),
        ("r:5000/c:v0.1.0@sha256:00", "", "0.2.0", "controller"),
        ("r/c:0.10.0", "", "0.9.0", "plugin"),
        ("r/c:dev", "", "0.1.0", ""),
        ("r/c:dev", "0.2.0", "0.1.0", "plugin"),
        ("r/c@sha256:00", "0.1.0", "0.1.0", ""),
        ("r/c:0.2.0", "", "unknown", ""),
    ],
)
def test_plugin_and_controller_have_one_minor_version(
    image: str, label: str, plugin: str, older: str
) -> None:
    findings = check_skew(deployment(image, label), plugin)
    assert [finding.fix for finding in findings] == ([f"Upgrade the {older}"] if older else [])
