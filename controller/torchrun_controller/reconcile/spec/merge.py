"""Kubernetes' strategic merge for pod templates.

Lists whose items have a key are merged item by item, all other lists are replaced; the keys are the
`patchMergeKey` tags of the PodSpec in k8s.io/api/core/v1/types.go.
"""

from torchrun_api.json import JsonObject, JsonValue

MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "ephemeralContainers": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
    "resourceClaims": "name",
}


def merge(base: JsonObject, over: JsonObject) -> JsonObject:
    """`over` laid on `base`; null removes a field. Neither argument is changed."""
    merged = dict(base)
    for name, value in over.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = _merge_value(name, merged.get(name), value)
    return merged


def _merge_value(name: str, base: JsonValue, over: JsonValue) -> JsonValue:
    if isinstance(base, dict) and isinstance(over, dict):
        return merge(base, over)
    key = MERGE_KEYS.get(name)
    if key and isinstance(base, list) and isinstance(over, list):
        return _merge_items(key, base, over)
    return over


def _merge_items(key: str, base: list[JsonValue], over: list[JsonValue]) -> list[JsonValue]:
    merged = list(base)
    places = {item[key]: i for i, item in enumerate(base) if isinstance(item, dict) and key in item}
    for item in over:
        place = places.get(item.get(key)) if isinstance(item, dict) else None
        if place is None:
            merged.append(item)
        else:
            old = merged[place]
            assert isinstance(old, dict)
            assert isinstance(item, dict)
            merged[place] = merge(old, item)
    return merged
