"""GKE, EKS, AKS, OpenShift, k3s and kind are recognized by what each of them sets."""

import re
from pathlib import Path

import pytest

from kubectl_torchrun.cluster.client import ApiError
from kubectl_torchrun.doctor.environment import (
    AKS,
    EKS,
    ENVIRONMENTS,
    GKE,
    K3S,
    KIND,
    ON_PREMISES,
    OPENSHIFT,
    ClusterEnvironment,
    check_environment,
    detect_environment,
    environment_of,
)
from kubectl_torchrun.doctor.snapshot import Answer

from .played import FORBIDDEN, groups, items, named, play

PAGE = Path(__file__).parents[4] / "docs" / "environments.md"


def node(provider: str = "", **labels: str) -> Answer:
    marks = {key.replace("__", "/").replace("_", "."): value for key, value in labels.items()}
    return items(named("n", labels={**marks}, spec={"providerID": provider}))


@pytest.mark.parametrize(
    ("answers", "environment"),
    [
        ({"version": {"gitVersion": "v1.34.1-gke.1829001"}}, GKE),
        ({"version": {"gitVersion": "v1.34.1-eks-ba24e9c"}}, EKS),
        ({"version": {"gitVersion": "v1.34.1+k3s1"}}, K3S),
        ({"nodes": node("azure:///subscriptions/x", kubernetes_azure_com__cluster="MC")}, AKS),
        ({"nodes": node("azure:///subscriptions/x", kubernetes_azure_com__agentpool="p")}, AKS),
        ({"nodes": node("gce://p/z/n", **{"cloud.google.com/gke-nodepool": "p"})}, GKE),
        ({"nodes": node("kind://docker/kind/kind-control-plane")}, KIND),
        ({"nodes": node("k3s://n")}, K3S),
        ({"groups": groups("apps", "config.openshift.io")}, OPENSHIFT),
        # OpenShift on a cloud: its own advice comes first.
        (
            {
                "groups": groups("config.openshift.io"),
                "nodes": node("azure:///x", kubernetes_azure_com__cluster="MC"),
            },
            OPENSHIFT,
        ),
        # Machines of a cloud with a Kubernetes of the user's own.
        ({"nodes": node("aws:///eu-central-1a/i-0123")}, ON_PREMISES),
        ({}, ON_PREMISES),
        ({"groups": FORBIDDEN, "nodes": node("kind://docker/kind/n")}, KIND),
        ({"nodes": FORBIDDEN, "version": {"gitVersion": "v1.34.1+k3s1"}}, K3S),
    ],
)
def test_an_environment_is_recognized(
    answers: dict[str, Answer], environment: ClusterEnvironment
) -> None:
    snapshot = play(**answers)
    assert detect_environment(snapshot)[0] is environment
    (found,) = check_environment(snapshot)
    assert found.text.startswith(environment.title)
    assert f"{environment.title} in docs/environments.md" in found.fix


def test_without_a_sign_and_without_nodes_the_environment_is_not_checked() -> None:
    snapshot = play(nodes=FORBIDDEN)
    with pytest.raises(ApiError):
        check_environment(snapshot)
    assert environment_of(snapshot) is ON_PREMISES


def test_each_environment_has_a_section_in_the_guide() -> None:
    headings = re.findall(r"^## (.+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert {environment.title for environment in ENVIRONMENTS} <= set(headings)
