"""Network plugins that enforce NetworkPolicies, by API group or DaemonSet."""

import pytest

from kubectl_torchrun.cluster.client import ApiError
from kubectl_torchrun.doctor.environment import EKS
from kubectl_torchrun.doctor.network import check_network
from kubectl_torchrun.doctor.snapshot import Answer
from torchrun_api.json import JsonObject, JsonValue

from .played import FORBIDDEN, groups, items, named, only, play, queue

ISOLATED = queue("closed", networking={"isolate": True})
K3S = {"gitVersion": "v1.34.1+k3s1"}


def aws_node(*arguments: str) -> JsonObject:
    words: list[JsonValue] = [*arguments]
    containers: list[JsonValue] = [
        {"name": "aws-node"},
        {"name": "aws-eks-nodeagent", "args": words},
    ]
    return items(named("aws-node", spec={"template": {"spec": {"containers": containers}}}))


@pytest.mark.parametrize(
    ("answers", "title"),
    [
        ({"groups": groups("cilium.io")}, "Cilium"),
        ({"daemonsets": items(named("anetd"))}, "Cilium"),
        ({"groups": groups("crd.projectcalico.org"), "daemonsets": FORBIDDEN}, "Calico"),
        ({"daemonsets": items(named("canal"), named("kube-flannel-ds"))}, "Calico"),
        ({"groups": groups("crd.antrea.io")}, "Antrea"),
        ({"groups": groups("k8s.ovn.org")}, "OVN-Kubernetes"),
        ({"daemonsets": items(named("azure-npm"))}, "Azure Network Policy Manager"),
        ({"daemonsets": items(named("kube-router"))}, "kube-router"),
        ({"daemonsets": aws_node("--enable-network-policy=true")}, "Amazon VPC CNI"),
    ],
)
def test_plugins_that_enforce_policies(answers: dict[str, Answer], title: str) -> None:
    (found,) = check_network(play(queues=items(ISOLATED), **answers))
    assert (found.verdict, found.text) == ("ok", f"{title} enforces NetworkPolicies")


@pytest.mark.parametrize(
    ("daemonsets", "text"),
    [
        (items(named("kube-flannel-ds")), "flannel does not enforce"),
        (aws_node("--enable-network-policy=false"), "Amazon VPC CNI does not enforce"),
        (aws_node(), "Amazon VPC CNI does not enforce"),
        (items(named("azure-cns")), "is not known"),
        (items(), "is not known"),
    ],
)
def test_isolation_may_have_no_effect(daemonsets: JsonObject, text: str) -> None:
    eks = {"gitVersion": "v1.34.1-eks-1"}
    answers: dict[str, Answer] = {"daemonsets": daemonsets, "version": {**eks}}
    found = only(check_network(play(queues=items(ISOLATED), **answers)), "warn")
    assert text in found.text
    assert "networking.isolate of closed" in found.text
    assert found.fix == EKS.policies
    assert text in only(check_network(play(queues=items(queue()), **answers)), "note").text


def test_k3s_enforces_policies_unless_it_is_told_not_to() -> None:
    answers: dict[str, Answer] = {"version": {**K3S}, "queues": items(ISOLATED)}
    found = only(check_network(play(**answers)), "note")
    assert "--disable-network-policy" in found.text
    assert only(check_network(play(groups=groups("cilium.io"), **answers)), "ok")
    answers["daemonsets"] = items(named("kube-flannel-ds"))
    assert "flannel does not" in only(check_network(play(**answers)), "warn").text


def test_daemon_sets_that_cannot_be_read_are_not_checked() -> None:
    with pytest.raises(ApiError):
        check_network(play(daemonsets=FORBIDDEN))
