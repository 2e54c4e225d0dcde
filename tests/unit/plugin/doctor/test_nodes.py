"""GPUs, device plugins, taints and autoscalers."""

import pytest

from kubectl_torchrun.cluster.client import ApiError
from kubectl_torchrun.doctor.nodes import check_autoscaler, check_nodes
from kubectl_torchrun.doctor.snapshot import Answer
from torchrun_api.json import JsonObject, JsonValue

from .played import FORBIDDEN, groups, items, named, only, play, queue, verdicts

ASKS: JsonObject = {"gpus": 8}
GPU_QUEUE = queue(nodeResources=ASKS)
CONFIG = named("cluster-autoscaler-status", data={})
OPENSHIFT_AUTOSCALER = items(named("default"))


def node(resources: dict[str, str], *taints: JsonObject, **labels: str) -> JsonObject:
    marks: JsonObject = {**labels}
    return named(
        "n", labels=marks, status={"allocatable": {**resources}}, spec={"taints": list(taints)}
    )


GPUS = node({"nvidia.com/gpu": "8"})
SKU: JsonObject = {"key": "sku", "value": "gpu", "effect": "NoSchedule"}
NVIDIA: JsonObject = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}


@pytest.mark.parametrize(
    "answers",
    [
        {"cluster_autoscaler": CONFIG},
        {"openshift_autoscalers": OPENSHIFT_AUTOSCALER},
        {"groups": groups("karpenter.sh")},
    ],
)
@pytest.mark.parametrize("nodes", [items(), items(node({}))])
def test_nodes_at_zero_are_no_failure_with_an_autoscaler(
    answers: dict[str, Answer], nodes: JsonObject
) -> None:
    findings = check_nodes(play(nodes=nodes, queues=items(GPU_QUEUE), **answers))
    assert not {"fail", "warn"} & set(verdicts(findings))
    assert any("can add nodes" in finding.text for finding in findings)


def test_nodes_at_zero_are_a_failure_without_one() -> None:
    assert verdicts(check_nodes(play(queues=items(GPU_QUEUE)))) == ["fail", "fail"]
    # OpenShift knows the kind, but has no object of it.
    snapshot = play(queues=items(GPU_QUEUE), openshift_autoscalers=items())
    assert verdicts(check_nodes(snapshot)) == ["fail", "fail"]


def test_an_autoscaler_that_cannot_be_read_leaves_a_doubt() -> None:
    snapshot = play(nodes=items(node({})), queues=items(GPU_QUEUE), cluster_autoscaler=FORBIDDEN)
    found = only(check_nodes(snapshot), "warn")
    assert "is not known" in found.text
    with pytest.raises(ApiError):
        check_autoscaler(snapshot)


@pytest.mark.parametrize(
    ("offered", "fix"),
    [
        ({"nvidia.com/mig-3g.40gb": "2"}, "nvidia.com/mig-3g.40gb"),
        ({"amd.com/gpu": "8"}, "amd.com/gpu"),
        ({"nvidia.com/gpu": "4"}, "lower nodeResources.gpus"),
        ({"nvidia.com/gpu": "4", "amd.com/gpu": "8"}, "lower nodeResources.gpus"),
        ({}, "NVIDIA GPU Operator"),
    ],
)
def test_a_missing_resource_has_a_fix(offered: dict[str, str], fix: str) -> None:
    snapshot = play(nodes=items(node(offered)), queues=items(GPU_QUEUE))
    assert fix in only(check_nodes(snapshot), "fail").fix


@pytest.mark.parametrize("amount", ["8k", "many", "-1", ""])
def test_amounts_of_any_form_are_read(amount: str) -> None:
    snapshot = play(nodes=items(node({"nvidia.com/gpu": amount})), queues=items(GPU_QUEUE))
    assert ("fail" in verdicts(check_nodes(snapshot))) is (amount != "8k")


@pytest.mark.parametrize(
    ("label", "value"),
    [
        ("nvidia.com/gpu.present", "true"),
        ("feature.node.kubernetes.io/pci-10de.present", "true"),
        ("cloud.google.com/gke-accelerator", "nvidia-h100-80gb"),
        ("kubernetes.azure.com/accelerator", "nvidia"),
        ("karpenter.k8s.aws/instance-gpu-count", "8"),
    ],
)
def test_a_node_with_a_gpu_needs_a_device_plugin(label: str, value: str) -> None:
    without = check_nodes(play(nodes=items(node({}, **{label: value}))))
    assert "no device plugin runs there" in only(without, "warn").text
    having = check_nodes(play(nodes=items(node({"nvidia.com/gpu": "8"}, **{label: value}))))
    assert verdicts(having) == ["ok", "ok"]


def test_a_node_whose_label_denies_a_gpu_needs_none() -> None:
    assert "warn" not in verdicts(
        check_nodes(play(nodes=items(node({}, **{"nvidia.com/gpu.present": "false"}))))
    )


@pytest.mark.parametrize(
    ("tolerations", "warned"),
    [
        ([], True),
        ([{"key": "sku", "operator": "Exists"}], False),
        ([{"key": "sku", "value": "gpu", "effect": "NoSchedule"}], False),
        ([{"key": "sku", "value": "cpu"}], True),
        ([{"key": "sku", "value": "gpu", "effect": "NoExecute"}], True),
        ([{"operator": "Exists"}], False),
    ],
)
@pytest.mark.parametrize("place", ["scheduling", "podTemplate"])
def test_a_queue_tolerates_the_taint_of_gpu_nodes(
    tolerations: list[JsonValue], warned: bool, place: str
) -> None:
    part: JsonObject = {"tolerations": tolerations}
    spec: JsonObject = {"nodeResources": ASKS}
    spec[place] = part if place == "scheduling" else {"spec": part}
    snapshot = play(nodes=items(node({"nvidia.com/gpu": "8"}, SKU)), queues=items(queue(**spec)))
    findings = check_nodes(snapshot)
    assert ("warn" in verdicts(findings)) is warned
    if warned:
        assert "such as sku=gpu:NoSchedule" in only(findings, "warn").text


def test_one_node_without_a_taint_is_enough() -> None:
    soft: JsonObject = {"key": "sku", "effect": "PreferNoSchedule"}
    for others in ([GPUS], [node({"nvidia.com/gpu": "8"}, soft)]):
        nodes = items(node({"nvidia.com/gpu": "8"}, SKU), *others)
        assert verdicts(check_nodes(play(nodes=nodes, queues=items(GPU_QUEUE)))) == ["ok", "ok"]


@pytest.mark.parametrize(("version", "warned"), [("v1.34.1-gke.1", False), ("v1.34.1", True)])
def test_only_gke_adds_the_toleration_of_the_resource(version: str, warned: bool) -> None:
    snapshot = play(
        version={"gitVersion": version},
        nodes=items(node({"nvidia.com/gpu": "8"}, NVIDIA)),
        queues=items(GPU_QUEUE),
    )
    assert ("warn" in verdicts(check_nodes(snapshot))) is warned


@pytest.mark.parametrize("effect", ["NoSchedule", "NoExecute"])
def test_taints_of_the_lifecycle_are_no_fault_of_the_queue(effect: str) -> None:
    taint: JsonObject = {"key": "node.kubernetes.io/not-ready", "effect": effect}
    nodes = items(node({"nvidia.com/gpu": "8"}, taint))
    assert verdicts(check_nodes(play(nodes=nodes, queues=items(GPU_QUEUE)))) == ["ok", "ok"]


READY: JsonObject = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}
LOST: JsonObject = {"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}}
CORDONED: JsonObject = {**READY, "spec": {"unschedulable": True}}


@pytest.mark.parametrize(
    ("parts", "verdict"),
    [
        ([READY, READY], "ok"),
        ([READY, LOST], "note"),
        ([READY, CORDONED], "note"),
        ([LOST, CORDONED], "warn"),
    ],
)
def test_nodes_that_are_not_ready_are_counted(parts: list[JsonObject], verdict: str) -> None:
    nodes = items(*(named(f"n-{at}", **part) for at, part in enumerate(parts)))
    found = check_nodes(play(nodes=nodes))[0]
    assert (found.subject, found.verdict) == ("nodes", verdict)


SHARES = queue("team", quota={"gpus": 8})
OFF: JsonObject = {"name": "TORCHRUN_ADMIT_BY_NODES", "value": "false"}
ON: JsonObject = {"name": "TORCHRUN_ADMIT_BY_NODES", "value": "true"}


def controller(**container: JsonValue) -> JsonObject:
    return items(named("c", spec={"template": {"spec": {"containers": [{**container}]}}}))


@pytest.mark.parametrize(
    ("queues", "deployments", "verdict"),
    [
        (items(GPU_QUEUE), controller(), "ok"),
        (items(SHARES), controller(), "warn"),
        (items(SHARES), controller(env=[ON]), "warn"),
        (items(SHARES), controller(env=[OFF]), "ok"),
        (items(SHARES), controller(args=["--admit-by-nodes=false"]), "ok"),
        (items(SHARES), controller(args=["--admit-by-nodes", "false"]), "ok"),
        (items(SHARES), controller(args=["--admit-by-nodes=true"]), "warn"),
        (items(queue("w", weight=2)), controller(), "warn"),
        (items(queue("c", cohort="x")), controller(), "warn"),
        (items(SHARES), FORBIDDEN, "note"),
        (items(SHARES), items(), "warn"),
    ],
)
def test_admission_by_nodes_starves_an_autoscaler(
    queues: JsonObject, deployments: Answer, verdict: str
) -> None:
    snapshot = play(groups=groups("karpenter.sh"), queues=queues, deployments=deployments)
    (found,) = check_autoscaler(snapshot)
    assert found.verdict == verdict
    assert ("admitByNodes" in found.fix) is (verdict != "ok")


def test_a_cluster_without_an_autoscaler_is_fine() -> None:
    assert verdicts(check_autoscaler(play(queues=items(SHARES)))) == ["ok"]
