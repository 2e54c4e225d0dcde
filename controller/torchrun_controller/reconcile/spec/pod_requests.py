"""What the pods of a gang request together, as the scheduler counts it."""

from fractions import Fraction
from math import ceil

import msgspec

from torchrun_api.core import Container, PodRequests, Resources
from torchrun_api.json import JsonObject
from torchrun_api.quantity import QuantityError, amount_of, format_bytes, format_cpu, parse
from torchrun_controller.reconcile.spec.errors import InvalidSpecError

_IN_BYTES = ("memory", "ephemeral-storage", "hugepages-")

# Of one pod. The status of its job records them all.
_MOST_RESOURCES = 64

Amounts = dict[str, Fraction]
Quantities = dict[str, int | str]


def total(parts: tuple[tuple[JsonObject, int], ...]) -> JsonObject:
    """Return the requests of all pods as a v1 ResourceList. `parts` are templates and counts."""
    sums: Amounts = {}
    for requests, pods in [(of_pod(part), pods) for part, pods in parts]:
        sums = _sum(sums, {name: amount * pods for name, amount in requests.items()})
    return {name: _format_quantity(name, sums[name]) for name in sorted(sums)}


def of_pod(template: JsonObject) -> Amounts:
    """Return the requests of one pod of a v1 PodTemplateSpec.

    Does not raise: what the API server refuses in a pod counts as nothing.
    """
    try:
        return of_spec(msgspec.convert(template.get("spec"), PodRequests))
    except msgspec.ValidationError:
        return {}


def check(template: JsonObject) -> None:
    """Check the resources of a v1 PodTemplateSpec.

    Raises:
        InvalidSpecError: they cannot be read.
    """
    try:
        spec = msgspec.convert(template.get("spec"), PodRequests)
        containers = (*spec.init_containers, *spec.containers)
        resources = (spec.resources, *(container.resources for container in containers))
        lists = (spec.overhead, *(part for r in resources for part in (r.requests, r.limits)))
        for quantity in (value for quantities in lists for value in quantities.values()):
            parse(quantity)
        resource_names = {name for quantities in lists for name in quantities}
    except (msgspec.ValidationError, QuantityError) as error:
        raise InvalidSpecError(
            f"podTemplate: the resources of the pods are invalid: {error}."
        ) from error
    if len(resource_names) > _MOST_RESOURCES:
        raise InvalidSpecError(
            f"podTemplate: a pod requests {len(resource_names)} different resources. Request at"
            f" most {_MOST_RESOURCES}."
        )


def of_spec(spec: PodRequests) -> Amounts:
    """Return the requests of one pod, in cores, bytes and units.

    kubernetes.io, "Resource sharing within containers": the larger of start and running.
    """
    running: Amounts = {}
    peak: Amounts = {}
    for container in spec.init_containers:
        with_container = _sum(running, _of_container(container))
        peak = _larger(peak, with_container)
        # A sidecar keeps running while later containers start.
        running = with_container if container.restart_policy == "Always" else running
    for container in spec.containers:
        running = _sum(running, _of_container(container))
    overhead = {name: amount_of(value) for name, value in spec.overhead.items()}
    containers = _larger(running, peak)
    return _sum(_larger(containers, _of_pod_level(spec.resources, containers)), overhead)


def _of_pod_level(resources: Resources, containers: Amounts) -> Amounts:
    """Return the requests of the pod as a whole; the API server refuses less than its containers.

    A limit is the default of a request only if no container requests the resource. Huge pages
    cannot be overcommitted: there it always is (defaultPodRequests in
    k8s.io/kubernetes/pkg/apis/core/v1/defaults.go).
    """
    defaults = {
        name: limit
        for name, limit in resources.limits.items()
        if name not in containers or name.startswith("hugepages-")
    }
    return {name: amount_of(value) for name, value in (defaults | resources.requests).items()}


def _of_container(container: Container) -> Amounts:
    """Return the requests; the API server uses limits where requests are missing."""
    resources = container.resources
    return {
        name: amount_of(value) for name, value in (resources.limits | resources.requests).items()
    }


def _sum(first: Amounts, second: Amounts) -> Amounts:
    if not (first and second):  # arithmetic with fractions is slow
        return first or second
    # In the order of the containers, not of a set: the same job gives the same Plan everywhere.
    zero = Fraction(0)
    return {name: first.get(name, zero) + second.get(name, zero) for name in {**first, **second}}


def _larger(first: Amounts, second: Amounts) -> Amounts:
    if not (first and second):
        return first or second
    zero = Fraction(0)
    return {
        name: max(first.get(name, zero), second.get(name, zero)) for name in {**first, **second}
    }


def _format_quantity(name: str, amount: Fraction) -> str:
    if name == "cpu":
        return format_cpu(amount)
    return format_bytes(amount) if name.startswith(_IN_BYTES) else str(ceil(amount))
