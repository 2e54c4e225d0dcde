"""Optional parts of a cluster: programs of Volcano, Kueue and others, as pinned in `go/`.

Custom resources and access rights are the projects' own manifests, read from their Go modules. The
programs run beside the cluster's other processes, under the names of the service accounts that
those manifests give the rights to; what would run them as pods is left out.
"""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from . import binaries, components
from .api import ApiServer
from .certificates import SCHEDULER, Authority, Subject
from .errors import ClusterError
from .state import State

Kubectl = Callable[..., subprocess.CompletedProcess[str]]
"""LocalCluster.kubectl."""

CRD = "CustomResourceDefinition"
RIGHTS_GROUP = "rbac.authorization.k8s.io"
RIGHTS = ("ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding")
PATIENCE = 180.0
"""Seconds for kubectl to apply or delete all objects of an addon, on a busy machine."""
WEBHOOKS = ("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration")
KUEUE_NAMESPACE = "kueue-system"
KUEUE_SERVICE = "kueue-webhook-service"


@dataclass(frozen=True)
class Addon:
    """Programs with the subjects they run as, and how the manifests become a cluster's own.

    `adapt` writes what the programs need below the cluster's folder and returns what to apply.
    `is_ready` says whether the programs do their work.
    """

    subjects: Mapping[str, Subject]
    manifests: tuple[str, ...]
    """Files, or folders for kustomize, in the programs' Go module."""
    adapt: Callable[[State, list[dict[str, Any]]], list[dict[str, Any]]]
    is_ready: Callable[[ApiServer], bool]
    custom_resources: tuple[Mapping[str, Any], ...] = ()
    """Objects of its own kinds, which are deleted with these kinds."""


def find(name: str) -> Addon:
    """The addon of that name."""
    if name not in ADDONS:
        raise ClusterError(f"unknown add-on {name!r}; there are {sorted(ADDONS)}")
    return ADDONS[name]


def apply(addon: Addon, name: str, cluster: State, kubectl: Kubectl) -> None:
    """Write the programs' configuration and create all objects that they need."""
    module = binaries.module_folder(next(iter(addon.subjects)))
    source = [each for path in addon.manifests for each in _read(module / path, kubectl)]
    objects = addon.adapt(cluster, source)
    record = _record(cluster, name)
    record.write_text(_list(objects))
    kubectl("apply", "--server-side", "--force-conflicts", "-f", str(record), timeout=PATIENCE)
    crds = [f"crd/{item['metadata']['name']}" for item in objects if item["kind"] == CRD]
    kubectl("wait", "--for=condition=Established", *crds, "--timeout=150s", timeout=PATIENCE)
    if addon.custom_resources:
        kubectl("apply", "-f", "-", stdin=_list(addon.custom_resources), timeout=PATIENCE)


def delete_custom_resources(name: str, cluster: State, kubectl: Kubectl) -> None:
    """Delete the kinds and all objects of them; the programs must run, for their finalizers."""
    items = json.loads(_record(cluster, name).read_text())["items"]
    crds = [item["metadata"]["name"] for item in items if item["kind"] == CRD]
    kubectl("delete", "crd", "--ignore-not-found", *crds, timeout=PATIENCE)


def delete_rest(name: str, cluster: State, kubectl: Kubectl) -> None:
    """Delete the webhooks, rights and namespaces; the programs have ended."""
    record = _record(cluster, name)
    kubectl("delete", "--ignore-not-found", "-f", str(record), timeout=PATIENCE)
    record.unlink()


def _list(objects: Sequence[Mapping[str, Any]]) -> str:
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})


def _record(cluster: State, name: str) -> Path:
    return cluster.folder / f"{name}.objects.json"


def _read(manifests: Path, kubectl: Kubectl) -> Iterator[dict[str, Any]]:
    is_folder = manifests.is_dir()
    text = kubectl("kustomize", str(manifests)).stdout if is_folder else manifests.read_text()
    # There is no YAML in Python's standard library.
    convert = ("create", "--dry-run=client", "--validate=false", "--output=json", "-f", "-")
    return _documents(kubectl(*convert, stdin=text).stdout)


def _documents(text: str) -> Iterator[dict[str, Any]]:
    decoder, start = json.JSONDecoder(), 0
    while text[start:].strip():
        document, start = decoder.raw_decode(text, text.index("{", start))
        yield document


def _volcano(cluster: State, objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    (configuration,) = (
        item["data"]["volcano-scheduler.conf"]
        for item in objects
        if item["metadata"]["name"] == "volcano-scheduler-configmap"
    )
    components.volcano_configuration(cluster).write_text(configuration)
    # Its webhooks check Volcano's own kinds of jobs, which nobody here makes.
    return [item for item in objects if item["kind"] in ("Namespace", CRD, *RIGHTS)]


def _volcano_is_ready(api: ApiServer) -> bool:
    return api.exists("/apis/scheduling.volcano.sh/v1beta1/queues/default")


def _kueue(cluster: State, objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    pki = components.kueue_certificates(cluster)
    # Kueue puts the authority into the webhooks itself, if the Secret has it with its key, under
    # this name (pkg/util/cert in its source); otherwise it makes one, for the Service's name alone.
    authority = Authority(pki, ("DNS:kueue-ca",), rsa=True)
    names = (f"DNS:{KUEUE_SERVICE}.{KUEUE_NAMESPACE}.svc", "IP:127.0.0.1")
    authority.create([Subject("tls", KUEUE_SERVICE, names=names)])
    configuration = _kueue_configuration(cluster, pki)
    components.kueue_configuration(cluster).write_text(json.dumps(configuration, indent=2) + "\n")
    manifests = [
        item for item in objects if item["kind"] in ("Namespace", "Secret", CRD, *RIGHTS, *WEBHOOKS)
    ]
    for item in manifests:
        if item["kind"] == "Secret":
            files = ("ca.crt", "ca.key", "tls.crt", "tls.key")
            item["data"] = {
                name: base64.b64encode((pki / name).read_bytes()).decode() for name in files
            }
        elif item["kind"] == CRD:
            conversion = item["spec"].get("conversion", {})
            _serve_here(cluster, conversion.get("webhook", {}))
        elif item["kind"] in WEBHOOKS:
            for webhook in item["webhooks"]:
                _serve_here(cluster, webhook)
    return manifests


def _serve_here(cluster: State, webhook: dict[str, Any]) -> None:
    client = webhook.get("clientConfig", {})
    if service := client.pop("service", None):
        client["url"] = f"https://127.0.0.1:{cluster.ports.webhook}{service['path']}"


def _kueue_configuration(cluster: State, pki: Path) -> dict[str, object]:
    return {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "namespace": KUEUE_NAMESPACE,
        "health": {"healthProbeBindAddress": "0"},
        "metrics": {"bindAddress": "0"},
        "webhook": {"host": "127.0.0.1", "port": cluster.ports.webhook, "certDir": str(pki)},
        "leaderElection": {"leaderElect": False},
        "integrations": {"frameworks": ["batch/job"]},
        # An API server of its own, on one more port.
        "featureGates": {"VisibilityOnDemand": False},
    }


def _kueue_is_ready(api: ApiServer) -> bool:
    group = "kueue.x-k8s.io/v1beta1"
    flavor = {"apiVersion": group, "kind": "ResourceFlavor", "metadata": {"name": "probe"}}
    # Not the version that is stored: both the admission and the conversion must answer.
    path = f"/apis/{group}/resourceflavors?dryRun=All"
    return api.request("POST", path, flavor)[0] == HTTPStatus.CREATED


def _coscheduling(cluster: State, objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    kubeconfig = cluster.component_kubeconfig("coscheduling-scheduler")
    plugin = {"enabled": [{"name": "Coscheduling"}]}
    profile = {
        "schedulerName": "scheduler-plugins-scheduler",
        # Pods of one gang must follow each other in the queue.
        "plugins": {"multiPoint": plugin, "queueSort": {**plugin, "disabled": [{"name": "*"}]}},
        # As in the project's own configuration.
        "pluginConfig": [{"name": "Coscheduling", "args": {"permitWaitingTimeSeconds": 10}}],
    }
    configuration = {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "leaderElection": {"leaderElect": False},
        "clientConnection": {"kubeconfig": str(kubeconfig)},
        "profiles": [profile],
    }
    components.coscheduling_configuration(cluster).write_text(json.dumps(configuration) + "\n")
    # The controller only counts pods in the status of their group, which nobody here reads.
    of_scheduler = "system:kube-scheduler:plugins"
    return [
        item
        for item in objects
        if item["kind"] == CRD
        or (item["kind"] in RIGHTS and item["metadata"]["name"] == of_scheduler)
    ]


def _coscheduling_is_ready(api: ApiServer) -> bool:
    return api.exists("/apis/scheduling.x-k8s.io/v1alpha1/podgroups")


def _kai(cluster: State, objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    del cluster
    # Those of its chart are templates.
    bindings = [
        {
            "apiVersion": RIGHTS_GROUP + "/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": component},
            "subjects": [{"kind": "User", "name": subject.common_name, "apiGroup": RIGHTS_GROUP}],
            "roleRef": {"kind": "ClusterRole", "name": component, "apiGroup": RIGHTS_GROUP},
        }
        for component, subject in KAI_ACCOUNTS.items()
    ]
    return [*objects, *bindings]


def _kai_is_ready(api: ApiServer) -> bool:
    return api.exists("/apis/scheduling.run.ai/v2/queues/default-queue")


def _kai_queue(name: str, parent: str | None) -> dict[str, Any]:
    amounts = {"quota": 0, "limit": -1, "overQuotaWeight": 1}
    spec: dict[str, Any] = {"resources": dict.fromkeys(("cpu", "gpu", "memory"), amounts)}
    return {
        "apiVersion": "scheduling.run.ai/v2",
        "kind": "Queue",
        "metadata": {"name": name},
        "spec": spec if parent is None else {**spec, "parentQueue": parent},
    }


def _kuberay(cluster: State, objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    del cluster
    manifests = [item for item in objects if item["kind"] in (CRD, *RIGHTS)]
    for item in manifests:
        if item["kind"] == CRD:
            # A megabyte each otherwise, over which the API server takes more than a minute.
            item["spec"]["versions"] = [v for v in item["spec"]["versions"] if v["storage"]]
            item["spec"] = _without_descriptions(item["spec"])
    return manifests


def _without_descriptions(part: object) -> object:
    if isinstance(part, list):
        return [_without_descriptions(each) for each in part]
    if not isinstance(part, dict):
        return part
    # Not a property of that name, which is no text.
    properties = {k: v for k, v in part.items() if k != "description" or not isinstance(v, str)}
    return {key: _without_descriptions(value) for key, value in properties.items()}


def _kuberay_is_ready(api: ApiServer) -> bool:
    return api.exists("/apis/ray.io/v1/rayclusters")


def _account(component: str, namespace: str, name: str) -> Subject:
    return Subject(component, f"system:serviceaccount:{namespace}:{name}")


KAI_ACCOUNTS = {
    "kai-scheduler": _account("kai-scheduler", "kai-scheduler", "scheduler"),
    "kai-binder": _account("kai-binder", "kai-scheduler", "binder"),
}
KAI_CHART = "deployments/kai-scheduler"

ADDONS = {
    "volcano": Addon(
        {
            name: _account(name, "volcano-system", name)
            for name in ("volcano-controllers", "volcano-scheduler")
        },
        ("installer/volcano-development.yaml",),
        _volcano,
        _volcano_is_ready,
    ),
    "kueue": Addon(
        {"kueue": _account("kueue", KUEUE_NAMESPACE, "kueue-controller-manager")},
        ("config/default",),
        _kueue,
        _kueue_is_ready,
    ),
    "coscheduling": Addon(
        # Its manifests extend the rights of kube-scheduler.
        {"coscheduling-scheduler": Subject("coscheduling-scheduler", SCHEDULER.common_name)},
        ("manifests/coscheduling/crd.yaml", "manifests/install/all-in-one.yaml"),
        _coscheduling,
        _coscheduling_is_ready,
    ),
    "kai": Addon(
        KAI_ACCOUNTS,
        (
            f"{KAI_CHART}/crds/kai.scheduler_topologies.yaml",
            *(
                f"{KAI_CHART}/crds/scheduling.run.ai_{kind}.yaml"
                for kind in ("bindrequests", "podgroups", "queues")
            ),
            *(f"{KAI_CHART}/templates/rbac/{part}.yaml" for part in ("scheduler", "binder")),
        ),
        _kai,
        _kai_is_ready,
        # As its chart creates them.
        (
            _kai_queue("default-parent-queue", None),
            _kai_queue("default-queue", "default-parent-queue"),
        ),
    ),
    "kuberay": Addon(
        {"kuberay-operator": _account("kuberay-operator", "default", "kuberay-operator")},
        ("config/default",),
        _kuberay,
        _kuberay_is_ready,
    ),
}
