"""How manifests of other projects are adapted."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from torchrun_api.kinds.gang_schedulers import GANG_SCHEDULERS
from torchrun_cluster import addons, components, state
from torchrun_cluster.errors import ClusterError
from torchrun_cluster.state import Size, Spec, State
from torchrun_controller.reconcile.queue.kai import PARENTS
from torchrun_controller.reconcile.schedulers.kai import DEFAULT_QUEUE

DEPLOYMENT = {"kind": "Deployment", "metadata": {"name": "manager"}}
SERVICE = {"service": {"name": "s", "namespace": "n", "path": "/mutate"}}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> State:
    monkeypatch.setenv("TORCHRUN_STATE", str(tmp_path))
    return state.create(Spec("demo", Size.CONTROL_PLANE))


def test_kueues_webhooks_are_called_where_it_runs(cluster: State) -> None:
    crd = {
        "kind": addons.CRD,
        "metadata": {"name": "workloads"},
        "spec": {"conversion": {"webhook": {"clientConfig": {**SERVICE}}}},
    }
    plain = {"kind": addons.CRD, "metadata": {"name": "topologies"}, "spec": {}}
    hooks = {
        "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": "hooks"},
        "webhooks": [{"name": "one", "clientConfig": {**SERVICE}}],
    }
    secret = {"kind": "Secret", "metadata": {"name": "certificates"}}
    applied = addons.find("kueue").adapt(cluster, [DEPLOYMENT, crd, plain, hooks, secret])
    assert [item["kind"] for item in applied] == [addons.CRD, addons.CRD, hooks["kind"], "Secret"]
    called = {"url": f"https://127.0.0.1:{cluster.ports.webhook}/mutate"}
    assert applied[0]["spec"]["conversion"]["webhook"]["clientConfig"] == called
    assert applied[2]["webhooks"][0]["clientConfig"] == called
    served = components.kueue_certificates(cluster) / "tls.crt"
    assert base64.b64decode(applied[3]["data"]["tls.crt"]) == served.read_bytes()
    # Kueue accepts our CA only with an RSA key in this format.
    assert b"BEGIN RSA PRIVATE KEY" in base64.b64decode(applied[3]["data"]["ca.key"])
    settings = json.loads(components.kueue_configuration(cluster).read_text())
    assert settings["webhook"]["port"] == cluster.ports.webhook


def test_volcanos_scheduler_gets_the_configuration_of_its_own_manifests(cluster: State) -> None:
    configuration = {
        "kind": "ConfigMap",
        "metadata": {"name": "volcano-scheduler-configmap"},
        "data": {"volcano-scheduler.conf": "actions: allocate"},
    }
    rights = {"kind": "ClusterRole", "metadata": {"name": "volcano-scheduler"}}
    assert addons.find("volcano").adapt(cluster, [DEPLOYMENT, configuration, rights]) == [rights]
    assert components.volcano_configuration(cluster).read_text() == "actions: allocate"


def test_coscheduling_is_a_scheduler_of_its_own_with_the_rights_of_kube_scheduler(
    cluster: State,
) -> None:
    crd = {"kind": addons.CRD, "metadata": {"name": "podgroups.scheduling.x-k8s.io"}}
    rights = {"kind": "ClusterRole", "metadata": {"name": "system:kube-scheduler:plugins"}}
    others = {"kind": "ClusterRole", "metadata": {"name": "scheduler-plugins-controller"}}
    addon = addons.find("coscheduling")
    assert addon.adapt(cluster, [crd, rights, others, DEPLOYMENT]) == [crd, rights]
    ((component, subject),) = addon.subjects.items()
    assert subject.common_name == "system:kube-scheduler"
    path = components.coscheduling_configuration(cluster)
    assert f"--config={path}" in components.command(cluster, component, {})
    configuration = json.loads(path.read_text())
    kubeconfig = configuration["clientConnection"]["kubeconfig"]
    assert kubeconfig == str(cluster.component_kubeconfig(component))
    (profile,) = configuration["profiles"]
    assert profile["schedulerName"] == GANG_SCHEDULERS["coscheduling"].pod_scheduler


def test_kais_programs_get_the_rights_of_its_chart(cluster: State) -> None:
    roles = [
        {"kind": "ClusterRole", "metadata": {"name": name}}
        for name in ("kai-scheduler", "kai-binder")
    ]
    addon = addons.find("kai")
    *kept, scheduler, binder = addon.adapt(cluster, roles)
    assert kept == roles
    for binding, (component, subject) in zip(
        (scheduler, binder), addon.subjects.items(), strict=True
    ):
        assert binding["roleRef"]["name"] == component
        assert [each["name"] for each in binding["subjects"]] == [subject.common_name]
        kubeconfig = str(cluster.component_kubeconfig(component))
        assert any(kubeconfig in part for part in components.command(cluster, component, {}))


def test_kai_has_the_queues_that_its_chart_creates() -> None:
    parent, default = addons.find("kai").custom_resources
    assert (parent["metadata"]["name"], default["metadata"]["name"]) == (PARENTS[-1], DEFAULT_QUEUE)
    assert default["spec"]["parentQueue"] == parent["metadata"]["name"]


def test_the_crds_of_kuberay_are_stripped(cluster: State) -> None:
    schema = {
        "description": "long",
        "properties": {"description": {"type": "string"}},
        "anyOf": [{"description": "longer", "type": "string"}],
    }
    versions = [
        {"name": name, "storage": name == "v1", "schema": {"openAPIV3Schema": schema}}
        for name in ("v1", "v1alpha1")
    ]
    crd = {"kind": addons.CRD, "metadata": {"name": "rayjobs"}, "spec": {"versions": versions}}
    rights = {"kind": "ClusterRole", "metadata": {"name": "kuberay-operator"}}
    definition, kept = addons.find("kuberay").adapt(cluster, [DEPLOYMENT, crd, rights])
    assert kept == rights
    (version,) = definition["spec"]["versions"]
    assert version["name"] == "v1"
    small = {"properties": {"description": {"type": "string"}}, "anyOf": [{"type": "string"}]}
    assert version["schema"]["openAPIV3Schema"] == small


def test_an_unknown_addon_is_refused() -> None:
    with pytest.raises(ClusterError, match="kueue"):
        addons.find("slurm")
