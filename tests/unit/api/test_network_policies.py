"""The NetworkPolicy of the controller selects the pods and ports of its Deployment."""

from pathlib import Path

import yaml

MANIFESTS = Path(__file__).parents[3] / "manifests"


def test_the_policy_selects_the_pods_and_ports_of_the_controller() -> None:
    policy = yaml.safe_load((MANIFESTS / "network-policies" / "controller.yaml").read_text())
    documents = yaml.safe_load_all((MANIFESTS / "controller" / "deployment.yaml").read_text())
    deployment = next(d for d in documents if d["kind"] == "Deployment")
    template = deployment["spec"]["template"]
    selector = policy["spec"]["podSelector"]["matchLabels"]
    assert selector.items() <= template["metadata"]["labels"].items()
    assert policy["metadata"]["namespace"] == deployment["metadata"]["namespace"]
    (container,) = template["spec"]["containers"]
    named = {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]}
    assert named == {port["name"] for port in container["ports"]}


def test_workers_in_the_host_network_can_report() -> None:
    """Their address is that of a node, which no selector of pods or namespaces matches."""
    policy = yaml.safe_load((MANIFESTS / "network-policies" / "controller.yaml").read_text())
    (rule,) = (
        rule
        for rule in policy["spec"]["ingress"]
        if "progress" in {port["port"] for port in rule["ports"]}
    )
    assert "from" not in rule
