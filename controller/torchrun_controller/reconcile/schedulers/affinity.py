"""Topology by pod affinity, for schedulers that know of no other."""

from torchrun_api.admission import Topology
from torchrun_api.json import JsonObject, JsonValue

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


def near_each_other(
    template: JsonObject, labels: JsonObject, topology: Topology | None
) -> JsonObject:
    """What is laid on the pod template, so that the pods with these labels keep together.

    The first pod matches its own term, so it is placed anywhere (kubernetes.io, "Inter-pod affinity
    and anti-affinity"). Affinity that the template has already stays.
    """
    if topology is None:
        return {}
    present = _object(_object(_object(template, "spec"), "affinity"), "podAffinity")
    terms: JsonObject = {}
    if topology.required is not None:
        required = _term(labels, topology.required)
        terms[_REQUIRED] = [*_list(present, _REQUIRED), required]
    if topology.preferred is not None:
        preferred: JsonObject = {
            "weight": 100,
            "podAffinityTerm": _term(labels, topology.preferred),
        }
        terms[_PREFERRED] = [*_list(present, _PREFERRED), preferred]
    return {"spec": {"affinity": {"podAffinity": terms}}}


def _term(labels: JsonObject, key: str) -> JsonObject:
    return {"topologyKey": key, "labelSelector": {"matchLabels": labels}}


def _object(body: JsonObject, name: str) -> JsonObject:
    value = body.get(name)
    return value if isinstance(value, dict) else {}


def _list(body: JsonObject, name: str) -> list[JsonValue]:
    value = body.get(name)
    return value if isinstance(value, list) else []
