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


def merge(base: JsonObject, override: JsonObject) -> JsonObject:
    """`base` with the values of `override`; null removes a field. Neither argument is changed."""
    result = dict(base)
    for name, value in override.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = _merge_value(name, result.get(name), value)
    return result


def _merge_value(name: str, base: JsonValue, override: JsonValue) -> JsonValue:
    if isinstance(base, dict) and isinstance(override, dict):
        return merge(base, override)
    key = MERGE_KEYS.get(name)
    if key and isinstance(base, list) and isinstance(override, list):
        return _merge_items(key, base, override)
    return override


def _merge_items(key: str, base: list[JsonValue], override: list[JsonValue]) -> list[JsonValue]:
    result = list(base)
    places = {_key_of(item, key): i for i, item in enumerate(base)}
    places.pop(None, None)
    for item in override:
        place = places.get(_key_of(item, key))
        if place is None:
            result.append(item)
        else:
            base_item = result[place]
            assert isinstance(base_item, dict)
            assert isinstance(item, dict)
            result[place] = merge(base_item, item)
    return result


def _key_of(item: JsonValue, key: str) -> str | float | None:
    """Return the key of an item; None without one, and for an object or a list in its place."""
    value = item.get(key) if isinstance(item, dict) else None
    return value if isinstance(value, str | int | float) else None
