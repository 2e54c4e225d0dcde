"""Kinds of gang schedulers, for an API server on which the schedulers do not run.

The kinds of coscheduling are those of its pinned Go module. Those of KAI, whose pinned module is
older than the versions that users need, have the fields that the controller writes or reads: the
API server refuses to apply any other field. TORCHRUN_TEST_CRDS names a folder with KAI's own CRDs
to use instead, such as `deployments/kai-scheduler/crds` of its repository.
"""

import json
import os
from pathlib import Path

from integration.controller_process import eventually
from torchrun_api.json import JsonObject
from torchrun_cluster import LocalCluster, binaries

KAI_QUEUES = "queues.scheduling.run.ai"
KAI_GROUPS = "podgroups.scheduling.run.ai"
KAI_TOPOLOGIES = "topologies.kai.scheduler"
COSCHEDULING_GROUPS = "podgroups.scheduling.x-k8s.io"
VOLCANO_GROUPS = "podgroups.scheduling.volcano.sh"
KUEUE_WORKLOADS = "workloads.kueue.x-k8s.io"

_FREE: JsonObject = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
_TEXT: JsonObject = {"type": "string"}
_NUMBER: JsonObject = {"type": "number"}
_COUNT: JsonObject = {"type": "integer", "format": "int32", "minimum": 0}


def _object(**properties: JsonObject) -> JsonObject:
    return {"type": "object", "properties": dict(properties)}


def _list(item: JsonObject) -> JsonObject:
    return {"type": "array", "items": item}


_AMOUNTS = _object(quota=_NUMBER, limit=_NUMBER, overQuotaWeight=_NUMBER)
_QUEUE = _object(
    spec=_object(
        parentQueue=_TEXT,
        resources=_object(cpu=_AMOUNTS, gpu=_AMOUNTS, memory=_AMOUNTS),
    ),
    status=_object(childQueues=_list(_TEXT)),
)
_CONDITION = _object(
    **dict.fromkeys(("type", "status", "reason", "message", "transitionID"), _TEXT),
    nodePool=_TEXT,
    lastTransitionTime={**_TEXT, "format": "date-time"},
)
_GROUP = _object(
    spec=_object(
        minMember=_COUNT,
        queue=_TEXT,
        priorityClassName=_TEXT,
        preemptibility=_TEXT,
        topologyConstraint=_object(
            topology=_TEXT, requiredTopologyLevel=_TEXT, preferredTopologyLevel=_TEXT
        ),
    ),
    status=_object(schedulingConditions=_list(_CONDITION)),
)
_TOPOLOGY = _object(spec=_object(levels=_list(_object(nodeLabel=_TEXT))))


def _definition(
    plural_and_group: str, kind: str, version: str, schema: JsonObject, scope: str = "Namespaced"
) -> JsonObject:
    plural, _, group = plural_and_group.partition(".")
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": plural_and_group,
            "annotations": {"api-approved.kubernetes.io": "unapproved, for a test"},
        },
        "spec": {
            "group": group,
            "scope": scope,
            "names": {"plural": plural, "singular": kind.lower(), "kind": kind},
            "versions": [
                {
                    "name": version,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": schema},
                    "subresources": {"status": {}},
                }
            ],
        },
    }


_KAI = {
    KAI_QUEUES: _definition(KAI_QUEUES, "Queue", "v2", _QUEUE, "Cluster"),
    KAI_GROUPS: _definition(KAI_GROUPS, "PodGroup", "v2alpha2", _GROUP),
    KAI_TOPOLOGIES: _definition(KAI_TOPOLOGIES, "Topology", "v1alpha1", _TOPOLOGY, "Cluster"),
}
# Tests that use them try access to the objects, not their content.
_WITHOUT_SCHEMA = {
    VOLCANO_GROUPS: _definition(VOLCANO_GROUPS, "PodGroup", "v1beta1", _FREE),
    KUEUE_WORKLOADS: _definition(KUEUE_WORKLOADS, "Workload", "v1beta2", _FREE),
}


def manifest(name: str) -> str:
    """The CRD of that name, as YAML or JSON."""
    if name == COSCHEDULING_GROUPS:
        module = binaries.module_folder("coscheduling-scheduler")
        return (module / "manifests" / "coscheduling" / "crd.yaml").read_text()
    plural, _, group = name.partition(".")
    folder = os.environ.get("TORCHRUN_TEST_CRDS")
    if folder and name in _KAI:
        return Path(folder, f"{group}_{plural}.yaml").read_text()
    return json.dumps({**_KAI, **_WITHOUT_SCHEMA}[name])


def install(cluster: LocalCluster, *names: str) -> None:
    """Install the CRDs of these names, and wait until they are served."""
    for name in names:
        cluster.kubectl("apply", "--server-side", "-f", "-", stdin=manifest(name))
    for name in names:
        listed = ("get", name, "--all-namespaces")
        eventually(
            f"{name} is served",
            lambda listed=listed: cluster.kubectl(*listed, check=False).returncode == 0,  # type: ignore[misc]
        )
