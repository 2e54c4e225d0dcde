"""Preferences among nodes, added to what a pod template says of affinity already."""

from typing import Literal

from torchrun_api.json import JsonObject, JsonValue, object_at

HOSTNAME = "kubernetes.io/hostname"


def prefer(
    template: JsonObject, operator: Literal["In", "NotIn"], hostnames: tuple[str, ...], weight: int
) -> JsonObject:
    """The v1 PodTemplateSpec with one more preference; no hostnames are none. Weight: 1 to 100."""
    if not hostnames:
        return template
    spec = object_at(template, "spec")
    affinity = object_at(spec, "affinity")
    node_affinity = object_at(affinity, "nodeAffinity")
    kind = "preferredDuringSchedulingIgnoredDuringExecution"
    present = node_affinity.get(kind)
    other: JsonObject = {
        "weight": weight,
        "preference": {
            "matchExpressions": [{"key": HOSTNAME, "operator": operator, "values": list(hostnames)}]
        },
    }
    preferences: list[JsonValue] = [*(present if isinstance(present, list) else ()), other]
    node_affinity = {**node_affinity, kind: preferences}
    affinity = {**affinity, "nodeAffinity": node_affinity}
    return {**template, "spec": {**spec, "affinity": affinity}}
