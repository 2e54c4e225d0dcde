"""Topology by pod affinity, for schedulers without topology of their own."""

from torchrun_api.admission import Topology
from torchrun_api.json import JsonObject, JsonValue, object_at

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


def topology_affinity(
    template: JsonObject, labels: JsonObject, topology: Topology | None
) -> JsonObject:
    """Return a patch of the pod template that places the pods with these labels close together.

    The first pod matches its own term, so it may be placed anywhere (kubernetes.io, "Inter-pod
    affinity and anti-affinity"). The terms that the template has are kept.
    """
    if topology is None:
        return {}
    present = object_at(object_at(object_at(template, "spec"), "affinity"), "podAffinity")
    terms: JsonObject = {}
    if topology.required is not None:
        required = _term(labels, topology.required)
        terms[_REQUIRED] = [*_terms_at(present, _REQUIRED), required]
    if topology.preferred is not None:
        preferred: JsonObject = {
            "weight": 100,
            "podAffinityTerm": _term(labels, topology.preferred),
        }
        terms[_PREFERRED] = [*_terms_at(present, _PREFERRED), preferred]
    return {"spec": {"affinity": {"podAffinity": terms}}}


def _term(labels: JsonObject, key: str) -> JsonObject:
    return {"topologyKey": key, "labelSelector": {"matchLabels": labels}}


def _terms_at(affinity: JsonObject, name: str) -> list[JsonValue]:
    terms = affinity.get(name)
    return terms if isinstance(terms, list) else []
