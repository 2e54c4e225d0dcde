"""`kubectl torchrun doctor` on a real API server with the objects of several environments.

No controller runs, which an administrator sees as a failure.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.controller_process import eventually, install_crds
from integration.played_environments import (
    EKS,
    K3S,
    OPENSHIFT,
    PLAYED,
    PlayedEnvironment,
    daemon_set,
    node,
    queue,
    storage_class,
)
from integration.test_plugin import USERS, Laptop, laptop
from kubectl_torchrun.doctor.findings import text_at
from torchrun_api.json import JsonObject, JsonValue
from torchrun_cluster import LocalCluster, Size

__all__ = ["laptop"]

Findings = list[dict[str, str]]
SCC = "security.openshift.io"


@pytest.fixture
def crds() -> Iterator[LocalCluster]:
    """A control plane for each test: its nodes, webhooks and CRDs concern all namespaces.

    An API server may need minutes to delete a CRD whose storage is not ready yet.
    """
    with LocalCluster(name=f"test-doctor-{os.getpid()}", size=Size.CONTROL_PLANE) as cluster:
        install_crds(cluster)
        yield cluster


def apply(cluster: LocalCluster, *objects: JsonObject) -> None:
    """Create or change the objects, and wait for the kinds among them."""
    groups = {text_at(item, "spec", "group") for item in objects if "Custom" in str(item["kind"])}
    listed = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=listed)
    eventually("the groups to be served", lambda: groups <= served_groups(cluster) or None)


def served_groups(cluster: LocalCluster) -> set[str]:
    listed = json.loads(cluster.kubectl("get", "--raw", "/apis").stdout)
    return {group["name"] for group in listed["groups"]}


def in_namespace(laptop: Laptop, kind: str, name: str, **parts: JsonValue) -> JsonObject:
    """An object of the namespace, by `apiVersion/Kind`."""
    version, _, title = kind.rpartition("/")
    metadata: JsonObject = {"name": name, "namespace": laptop.namespace}
    return {"apiVersion": version, "kind": title, "metadata": metadata, **parts}


def a_queue(laptop: Laptop, spec: JsonObject) -> JsonObject:
    return in_namespace(laptop, "torchrun.ai/v1alpha1/TorchrunQueue", "gpu", spec=spec)


def doctor(laptop: Laptop, controller: str = "fail") -> Findings:
    """The findings, except for the one with this verdict that no controller runs."""
    code, out, err = laptop.run("doctor", "-o", "json")
    findings: Findings = json.loads(out)["findings"]
    (found,) = of(findings, "controller")
    assert found["verdict"] == controller
    assert code == any(f["verdict"] == "fail" for f in findings), out + err
    return [f for f in findings if f is not found]


def of(findings: Findings, subject: str) -> Findings:
    return [finding for finding in findings if finding["subject"] == subject]


@pytest.mark.parametrize("played", PLAYED, ids=lambda played: played.title)
def test_an_environment_is_recognized_and_its_queue_fits(
    laptop: Laptop, played: PlayedEnvironment
) -> None:
    apply(laptop.cluster, *played.objects, a_queue(laptop, played.queue))
    findings = doctor(laptop)
    (environment,) = of(findings, "environment")
    assert environment["text"].startswith(played.title)
    assert played.sign in environment["text"]
    assert f"ReadWriteMany: {played.shared}" in of(findings, "shared")[0]["text"]
    (network,) = of(findings, "network")
    assert (network["verdict"], played.network[1] in network["text"]) == (played.network[0], True)
    assert played.autoscaler in of(findings, "autoscaler")[0]["text"]
    assert [f["verdict"] for f in of(findings, "GPUs")] == ["ok"]
    expected = {"network"} if played is EKS else {"admission"} if played is OPENSHIFT else set()
    assert {f["subject"] for f in findings if f["verdict"] in ("warn", "fail")} == expected
    assert not [f for f in findings if f["verdict"] == "skip"]


def test_service_accounts_on_openshift_need_a_constraint(laptop: Laptop) -> None:
    role: JsonObject = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {"name": "use-nonroot-v2"},
        "rules": [
            {
                "apiGroups": [SCC],
                "resources": ["securitycontextconstraints"],
                "resourceNames": ["nonroot-v2"],
                "verbs": ["use"],
            }
        ],
    }
    binding = in_namespace(
        laptop,
        "rbac.authorization.k8s.io/v1/RoleBinding",
        "use-nonroot-v2",
        roleRef={
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "ClusterRole",
            "name": "use-nonroot-v2",
        },
        subjects=[{"kind": "ServiceAccount", "name": "default", "namespace": laptop.namespace}],
    )
    apply(laptop.cluster, *OPENSHIFT.objects, a_queue(laptop, OPENSHIFT.queue))
    (refused,) = of(doctor(laptop), "admission")
    apply(laptop.cluster, role, binding)
    (accepted,) = of(doctor(laptop), "admission")
    assert (refused["verdict"], accepted["verdict"]) == ("fail", "note")
    assert f"add-scc-to-user nonroot-v2 -z default -n {laptop.namespace}" in refused["fix"]
    assert "may use nonroot-v2" in accepted["text"]


def test_broken_settings_of_a_cluster_are_reported(laptop: Laptop) -> None:
    spec = queue("local-path", isolate=True)
    objects = (
        node("cpu-only", "k3s://n", {"nvidia.com/gpu.present": "true"}, gpus=0),
        storage_class("local-path", "rancher.io/local-path", default=True),
        daemon_set("kube-flannel-ds"),
        in_namespace(laptop, "v1/ResourceQuota", "small",
                     spec={"hard": {"requests.nvidia.com/gpu": "4", "limits.cpu": "100"}}),
        in_namespace(laptop, "v1/LimitRange", "range",
                     spec={"limits": [{"type": "Container", "max": {"memory": "512Gi"}}]}),
        a_queue(laptop, spec),
    )  # fmt: skip
    apply(laptop.cluster, *objects)
    findings = doctor(laptop)
    problems = {
        f"{f['subject']}: {f['text']}" for f in findings if f["verdict"] in ("warn", "fail")
    }
    expected = (
        "GPUs: Nodes with GPUs by their labels offer none to pods (1: cpu-only)",
        "GPUs: Queue gpu requests 8 nvidia.com/gpu for a node",
        "shared: No storage class is known to support ReadWriteMany",
        "storage: Queue gpu has its checkpoints in class local-path",
        "network: flannel does not enforce NetworkPolicies",
        "quota: Each node of queue gpu needs 8 nvidia.com/gpu, but ResourceQuota small allows 4",
        "quota: ResourceQuota small counts limits.cpu",
        "limits: LimitRange range allows 512Gi memory for each container",
    )
    for text in expected:
        assert [problem for problem in problems if problem.startswith(text)], (text, problems)
    assert len(problems) == len(expected), problems


def webhook(namespace: str, *, service: str) -> JsonObject:
    """A webhook that refuses pods of the namespace while its service does not answer."""
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": "policies"},
        "webhooks": [
            {
                "name": "pods.policies.example.com",
                "admissionReviewVersions": ["v1"],
                "sideEffects": "None",
                "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
                "clientConfig": {"service": {"namespace": namespace, "name": service}},
                "rules": [
                    {
                        "operations": ["CREATE"],
                        "apiGroups": [""],
                        "apiVersions": ["v1"],
                        "resources": ["pods"],
                    }
                ],
            }
        ],
    }


def test_a_webhook_without_endpoints_is_a_failure(laptop: Laptop) -> None:
    service = in_namespace(
        laptop, "v1/Service", "policies", spec={"ports": [{"port": 443}], "clusterIP": "None"}
    )
    slices = in_namespace(
        laptop,
        "discovery.k8s.io/v1/EndpointSlice",
        "policies-1",
        addressType="IPv4",
        endpoints=[{"addresses": ["10.1.1.1"], "conditions": {"ready": True}}],
        ports=[{"port": 443}],
    )
    slices["metadata"]["labels"] = {"kubernetes.io/service-name": "policies"}  # type: ignore[index,call-overload]
    hook = webhook(laptop.namespace, service="policies")
    apply(laptop.cluster, *K3S.objects, a_queue(laptop, K3S.queue), service, hook)
    without = of(doctor(laptop), "webhooks")
    apply(laptop.cluster, slices)
    having = of(doctor(laptop), "webhooks")
    apply(laptop.cluster, webhook("kube-system", service="policies"))
    other = of(doctor(laptop), "webhooks")
    assert [f["verdict"] for f in without] == ["note", "fail"]
    assert "no ready endpoint" in without[1]["text"]
    assert [f["verdict"] for f in having] == ["note"]
    assert [f["verdict"] for f in other] == ["ok"]


def test_the_levels_of_pod_security(laptop: Laptop) -> None:
    level = "pod-security.kubernetes.io/enforce=restricted"
    laptop.cluster.kubectl("label", "namespace", laptop.namespace, level)
    apply(laptop.cluster, *K3S.objects, a_queue(laptop, K3S.queue))
    refused = of(doctor(laptop), "security")
    restricted: JsonObject = {**K3S.queue, "podSecurity": "restricted"}
    apply(laptop.cluster, a_queue(laptop, restricted))
    accepted = of(doctor(laptop), "security")
    assert [f["verdict"] for f in refused] == ["note", "warn"]
    assert [f["verdict"] for f in accepted] == ["note"]


def test_what_a_user_may_not_read_is_not_checked(laptop: Laptop) -> None:
    cluster, namespace = laptop.cluster, laptop.namespace
    cluster.kubectl("apply", "-f", str(USERS))
    cluster.kubectl("create", "rolebinding", "anna", "--clusterrole=edit", "--user=anna",
                    "-n", namespace)  # fmt: skip
    # The controller-manager adds the rules to the role edit, and those of view after them.
    for action in ("create torchrunjobs", "list torchrunqueues"):
        may = ("auth", "can-i", *action.split(), "--as=anna", "-n", namespace)
        eventually(action, lambda may=may: cluster.kubectl(*may, check=False).returncode == 0)
    config = json.loads(cluster.kubectl("config", "view", "--raw", "-o", "json").stdout)
    for user in config["users"]:
        user["user"]["as"] = "anna"
    kubeconfig = laptop.project / "anna.json"
    kubeconfig.write_text(json.dumps(config))
    apply(cluster, *EKS.objects, a_queue(laptop, EKS.queue))
    whole = {f["subject"] for f in doctor(laptop)}
    laptop.kubeconfig = str(Path(kubeconfig))
    findings = doctor(laptop, controller="skip")
    skipped = {f["subject"] for f in findings if f["verdict"] == "skip"}
    assert skipped == {"environment", "storage", "nodes", "network", "webhooks"}
    # Karpenter is known by its API group, which every user may list.
    assert "Karpenter adds nodes" in of(findings, "autoscaler")[0]["text"]
    assert {f["subject"] for f in findings} == whole - {"GPUs", "shared"}
    assert all("no permission to read it" in f["text"] for f in findings if f["verdict"] == "skip")
    (permissions,) = of(findings, "permissions")
    assert permissions["verdict"] == "ok"
    assert not [f for f in findings if f["verdict"] == "fail"]
