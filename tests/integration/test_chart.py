"""The chart renders the same objects as the manifests, and every value works as documented."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from integration.charts import (
    CHART,
    KUBERNETES,
    MANIFESTS,
    RELEASE,
    Object,
    Objects,
    helm,
    kustomize,
    template,
    without_helms_own,
)

NAMESPACE = "torchrun-system"
TEAM = "team-a"
NAME_LABEL = "app.kubernetes.io/name"
KEEP = "helm.sh/resource-policy"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
CLUSTER_KINDS = {
    *("Namespace", "CustomResourceDefinition", "ClusterRole", "ClusterRoleBinding"),
    *("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding", "PriorityClass"),
}


def comparable(chart_objects: Objects) -> Objects:
    """The object without labels of Helm, and with sorted variables.

    The chart sets the name label on all objects, the manifests only on selected ones.
    """
    plain = {
        key: without_helms_own(item) for key, item in chart_objects.items() if key[0] != "Namespace"
    }
    for key, item in plain.items():
        assert isinstance(item, dict)
        labels = item["metadata"].get("labels", {})
        labels.pop(NAME_LABEL, None)
        if not labels:
            item["metadata"].pop("labels", None)
        if key[0] == "Deployment":
            container(item)["env"].sort(key=lambda variable: variable["name"])
    return plain  # type: ignore[return-value]


def container(deployment: Object) -> Object:
    (only,) = deployment["spec"]["template"]["spec"]["containers"]
    return only


def deployment(chart_objects: Objects) -> Object:
    (only,) = (item for key, item in chart_objects.items() if key[0] == "Deployment")
    return only


def environment(chart_objects: Objects) -> dict[str, Any]:
    return {v["name"]: v.get("value") for v in container(deployment(chart_objects))["env"]}


def test_the_chart_equals_the_manifests() -> None:
    assert comparable(template()) == comparable(kustomize("."))


def test_the_chart_for_one_namespace_equals_the_overlay() -> None:
    once = ("--set=singleNamespace=true", "--set=crds.install=false")
    rendered = template(*once, namespace=TEAM)
    assert comparable(rendered) == comparable(kustomize("overlays/single-namespace"))


def test_monitoring_of_the_chart_equals_its_folder() -> None:
    wanted = [
        f"--set=monitoring.{name}=true" for name in ("podMonitor", "prometheusRule", "dashboards")
    ]
    before = template()
    more = {key: item for key, item in template(*wanted).items() if key not in before}
    assert comparable(more) == comparable(kustomize("monitoring"))


def test_a_controller_of_one_namespace_has_nothing_elsewhere() -> None:
    for kind, namespace, name in kustomize("overlays/single-namespace"):
        assert kind not in CLUSTER_KINDS, name
        assert namespace == TEAM, name


def test_a_name_is_longer_than_the_release() -> None:
    ended = helm("template", "mine", str(CHART), f"--kube-version={KUBERNETES}")
    assert "name: mine-torchrun-controller\n" in ended.stdout
    assert "name: mine-torchrun-controller-leader-election\n" in ended.stdout
    assert "http://mine-torchrun-controller.$(POD_NAMESPACE).svc:8081" in ended.stdout


def test_crds_outlive_the_release_by_default() -> None:
    kinds = [o for key, o in template().items() if key[0] == "CustomResourceDefinition"]
    assert len(kinds) == 2
    assert all(kind["metadata"]["annotations"][KEEP] == "keep" for kind in kinds)
    kinds = [
        o
        for key, o in template("--set=crds.keep=false").items()
        if key[0] == "CustomResourceDefinition"
    ]
    assert all(KEEP not in kind["metadata"].get("annotations", {}) for kind in kinds)


def test_cluster_wide_objects_can_be_omitted() -> None:
    kinds = {key[0] for key in template("--set=crds.install=false")}
    assert "ClusterRole" in kinds
    assert not kinds & {"CustomResourceDefinition", "ValidatingAdmissionPolicy"}
    names = {key[2] for key in template("--set=crds.install=false")}
    assert not names & {"torchrun-view", "torchrun-edit", "torchrun-admin"}
    assert "ClusterRole" not in {
        key[0] for key in template("--set=rbac.create=false,rbac.userRoles=false")
    }


ALL_VALUES = {
    "image": {"repository": "registry.example.com:5000/a/b", "digest": "sha256:" + "0" * 64},
    "imagePullSecrets": [{"name": "pull"}],
    "replicas": 3,
    "progress": False,
    "settings": {
        "logLevel": "debug",
        "workers": 1000,
        "admitByNodes": False,
        "cohortNamespaces": "prod,research",
        "kaiQuotaNamespaces": "research",
        "nodeOverhead": "cpu=2,memory=8Gi",
        "etcdEndpoint": "etcd.infra.svc:2379",
    },
    "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy.example.com"}],
    "serviceAccount": {"name": "runner", "annotations": {"example.com/role": "runner"}},
    "resources": {"limits": {"memory": "1Gi"}},
    "priorityClassName": "system-cluster-critical",
    "nodeSelector": {"pool": "system"},
    "tolerations": [{"operator": "Exists"}],
    "affinity": {"podAntiAffinity": {}},
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
    ],
    "podDisruptionBudget": {"maxUnavailable": "50%"},
    "podLabels": {"team": "ml"},
    "podAnnotations": {"example.com/a": "b"},
    "networkPolicy": {"enabled": True},
    "monitoring": {"podMonitor": True, "labels": {"release": "prometheus"}},
    "fullnameOverride": "runs",
}


def test_values_reach_their_fields(tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_text(json.dumps(ALL_VALUES))
    chart_objects = template(f"--values={tmp_path / 'values.yaml'}")
    made = deployment(chart_objects)
    pod, main = made["spec"]["template"]["spec"], container(made)
    image = "registry.example.com:5000/a/b@sha256:" + "0" * 64
    variables = environment(chart_objects)
    assert main["image"] == variables["TORCHRUN_RUNTIME_IMAGE"] == image
    assert "TORCHRUN_PROGRESS_URL" not in variables
    assert variables["TORCHRUN_LOG_LEVEL"] == "debug"
    assert variables["TORCHRUN_WORKERS"] == "1000"
    assert variables["TORCHRUN_ADMIT_BY_NODES"] == "false"
    assert variables["TORCHRUN_NODE_OVERHEAD"] == "cpu=2,memory=8Gi"
    assert variables["TORCHRUN_COHORT_NAMESPACES"] == "prod,research"
    assert variables["TORCHRUN_KAI_QUOTA_NAMESPACES"] == "research"
    assert variables["HTTPS_PROXY"] == "http://proxy.example.com"
    assert made["spec"]["replicas"] == 3
    assert made["metadata"]["name"] == "runs"
    for name in (
        "imagePullSecrets",
        "priorityClassName",
        "nodeSelector",
        "tolerations",
        "affinity",
        "topologySpreadConstraints",
    ):
        assert pod[name] == ALL_VALUES[name], name
    # Given values are merged with the defaults, as Helm does with maps.
    assert main["resources"] == {**VALUES["resources"], "limits": {"memory": "1Gi"}}
    meta = made["spec"]["template"]["metadata"]
    assert meta["labels"]["team"] == "ml"
    assert meta["annotations"] == {"example.com/a": "b"}  # the PodMonitor replaces the defaults
    account = chart_objects["ServiceAccount", NAMESPACE, "runner"]
    assert account["metadata"]["annotations"] == {"example.com/role": "runner"}
    assert pod["serviceAccountName"] == "runner"
    monitor = chart_objects["PodMonitor", NAMESPACE, "runs"]
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    policy = yaml.safe_load((MANIFESTS / "network-policies" / "controller.yaml").read_text())
    made_policy = without_helms_own(chart_objects["NetworkPolicy", NAMESPACE, "runs"])
    assert isinstance(made_policy, dict)
    assert made_policy["spec"] == policy["spec"]
    budget = chart_objects["PodDisruptionBudget", NAMESPACE, "runs"]
    assert budget["spec"]["maxUnavailable"] == "50%"
    subjects = [o["subjects"] for key, o in chart_objects.items() if key[0].endswith("RoleBinding")]
    assert all(
        s == [{"kind": "ServiceAccount", "name": "runner", "namespace": NAMESPACE}]
        for s in subjects
    )


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ("replicas=two", "/replicas"),
        ("replica=2", "'replica'"),
        ("image.tag=a b", "/image/tag"),
        ("image.repository=registry/a:tag", "/image/repository"),
        ("image.pullPolicy=Sometimes", "/image/pullPolicy"),
        ("settings.logLevel=loud", "/settings/logLevel"),
        ("settings.workers=0", "/settings/workers"),
        ("settings.worker=4", "'worker'"),
        ("progress=maybe", "/progress"),
        ("crds.keep=1", "/crds/keep"),
        ("networkPolicy.metricsNamespace=a.b", "/networkPolicy/metricsNamespace"),
        ("networkPolicy.metricsNamespace=", "/networkPolicy/metricsNamespace"),
        ("tolerations=all", "/tolerations"),
        ("fullnameOverride=Mine", "/fullnameOverride"),
    ],
)
def test_a_wrong_value_is_refused_with_its_name(value: str, where: str) -> None:
    ended = helm("template", RELEASE, str(CHART), f"--kube-version={KUBERNETES}", f"--set={value}")
    assert ended.returncode != 0
    assert "don't meet the specifications of the schema" in ended.stderr
    assert where in ended.stderr, ended.stderr


def test_an_old_kubernetes_is_refused() -> None:
    ended = helm("template", RELEASE, str(CHART), "--kube-version=1.32.9")
    assert "requires kubeVersion: >=1.33.0-0" in ended.stderr


def test_the_package_has_all_linked_files(tmp_path: Path) -> None:
    ended = helm("package", str(CHART), f"--destination={tmp_path}")
    assert ended.returncode == 0, ended.stderr
    (packed,) = tmp_path.iterdir()
    assert packed.stat().st_size < 200_000, "the release fits into a Secret of 1 MiB"
    assert template(chart=packed) == template()


def test_without_election_one_replica_writes_at_a_time() -> None:
    off = "--set=settings.leaderElection=false"
    for replicas in (0, 1):
        spec = deployment(template(off, f"--set=replicas={replicas}"))["spec"]
        # Also during a rollout: the old pod ends before the new one starts.
        assert spec["strategy"] == {"type": "Recreate"}
    ended = helm("template", RELEASE, str(CHART), f"--kube-version={KUBERNETES}", off)
    assert ended.returncode != 0
    assert "settings.leaderElection=false needs replicas=1, not 2" in ended.stderr
    bypass = "--set=extraEnv[0].name=TORCHRUN_LEADER_ELECTION,extraEnv[0].value=no"
    ended = helm("template", RELEASE, str(CHART), f"--kube-version={KUBERNETES}", bypass)
    assert ended.returncode != 0
    wanted = "set settings.leaderElection instead of TORCHRUN_LEADER_ELECTION in extraEnv"
    assert wanted in ended.stderr
    for election in ((), ("--set=settings.leaderElection=true",)):
        assert "strategy" not in deployment(template(*election))["spec"]


@pytest.mark.parametrize("namespace", ["monitoring", "observability"])
def test_the_namespace_of_prometheus_can_be_named(namespace: str) -> None:
    values = f"--set=networkPolicy.enabled=true,networkPolicy.metricsNamespace={namespace}"
    policy = template(values)["NetworkPolicy", NAMESPACE, RELEASE]
    metrics, progress = policy["spec"]["ingress"]
    (source,) = metrics["from"]
    assert source["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": namespace}
    assert "from" not in progress


def selectors(rendered: Objects) -> dict[str, dict[str, str]]:
    """The labels that each object of a release selects pods by, without the Deployment."""
    found = {}
    for (kind, _, _), item in rendered.items():
        spec = item.get("spec", {})
        chosen = spec.get("podSelector" if kind == "NetworkPolicy" else "selector")
        if chosen is not None and kind != "Deployment":
            found[kind] = chosen.get("matchLabels", chosen)
    return found


def test_two_releases_in_a_namespace_do_not_select_each_others_pods() -> None:
    """The eviction API refuses a pod with two budgets, and a Service balances over all it finds."""
    all_on = "--set=networkPolicy.enabled=true,monitoring.podMonitor=true"
    ours, theirs = template(all_on), template(all_on, release="other")
    chosen = selectors(ours)
    assert set(chosen) == {"PodDisruptionBudget", "Service", "NetworkPolicy", "PodMonitor"}
    own, foreign = (
        deployment(objects)["spec"]["template"]["metadata"]["labels"] for objects in (ours, theirs)
    )
    for kind, labels in chosen.items():
        assert labels.items() <= own.items(), kind
        assert not labels.items() <= foreign.items(), kind
    # A Deployment's selector cannot change.
    plain = deployment(kustomize("."))["spec"]["selector"]
    assert deployment(ours)["spec"]["selector"] == plain


def test_prometheus_finds_the_pods_in_one_way_only() -> None:
    by_annotations = VALUES["podAnnotations"]
    assert set(by_annotations) == {f"prometheus.io/{n}" for n in ("scrape", "port", "path")}
    pods = deployment(template())["spec"]["template"]["metadata"]
    assert pods["annotations"] == by_annotations
    pods = deployment(template("--set=monitoring.podMonitor=true"))["spec"]["template"]["metadata"]
    assert "annotations" not in pods


def test_lint() -> None:
    for values in ((), ("--set=settings.leaderElection=false,replicas=1",)):
        ended = helm("lint", "--strict", str(CHART), *values)
        assert ended.returncode == 0, ended.stdout + ended.stderr
