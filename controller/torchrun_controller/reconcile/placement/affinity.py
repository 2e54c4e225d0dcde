"""Preferences for nodes by hostname, added to the affinity that a pod template has."""

from collections.abc import Mapping
from typing import Literal

from torchrun_api.core import Node
from torchrun_api.json import JsonObject, JsonValue, object_at

HOSTNAME = "kubernetes.io/hostname"


def add_preference(
    template: JsonObject, operator: Literal["In", "NotIn"], hostnames: tuple[str, ...], weight: int
) -> JsonObject:
    """Return the v1 PodTemplateSpec with one more preference, unless `hostnames` is empty.

    `weight` is 1 to 100.
    """
    if not hostnames:
        return template
    spec = object_at(template, "spec")
    affinity = object_at(spec, "affinity")
    node_affinity = object_at(affinity, "nodeAffinity")
    kind = "preferredDuringSchedulingIgnoredDuringExecution"
    old_preferences = node_affinity.get(kind)
    preference: JsonObject = {
        "weight": weight,
        "preference": {
            "matchExpressions": [{"key": HOSTNAME, "operator": operator, "values": list(hostnames)}]
        },
    }
    preferences: list[JsonValue] = [
        *(old_preferences if isinstance(old_preferences, list) else ()),
        preference,
    ]
    node_affinity = {**node_affinity, kind: preferences}
    affinity = {**affinity, "nodeAffinity": node_affinity}
    return {**template, "spec": {**spec, "affinity": affinity}}


def hostnames(nodes: Mapping[str, Node] | None, node_names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the label kubernetes.io/hostname of each node: usually, but not always, its name."""
    nodes_by_name = nodes or {}
    labels = (
        nodes_by_name[name].metadata.labels if name in nodes_by_name else {} for name in node_names
    )
    return tuple(
        node_labels.get(HOSTNAME) or name
        for node_labels, name in zip(labels, node_names, strict=True)
    )
