"""The requests of the pods of a gang: those of the spec, and those that were admitted.

An admission records what its queue is charged with: the queue, and the requests of each pod. A gang
is created only if it fits what was admitted. A later edit of the spec changes no charge.

The requests of a pod are what the scheduler counts.
"""

from fractions import Fraction
from math import ceil

import msgspec
from msgspec import Struct, structs

from torchrun_api import names
from torchrun_api.json import JsonObject
from torchrun_api.kinds.admission import Admission, AdmittedHead
from torchrun_api.kinds.core import Container, PodRequests, Resources
from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.quantity import QuantityError, amount_of, format_bytes, format_cpu, parse
from torchrun_api.kinds.queue import TorchrunQueue
from torchrun_api.kinds.shared import PodTemplate
from torchrun_controller.reconcile.model.messages import count_of
from torchrun_controller.reconcile.spec.errors import InvalidSpecError
from torchrun_controller.reconcile.spec.merge import merge
from torchrun_controller.reconcile.spec.pod_template import set_launcher_resources
from torchrun_controller.reconcile.spec.size import Size

_IN_BYTES = ("memory", "ephemeral-storage", "hugepages-")

# Of one pod. The status of its job records them all.
_MOST_RESOURCES = 64

Amounts = dict[str, Fraction]
Quantities = dict[str, int | str]


class GangRequests(Struct, frozen=True, kw_only=True):
    """`pod` is what each pod requests, with the pod itself: {"pods": 1, "cpu": 1500, ...}.

    "cpu" is in millicores, "memory" in bytes, all else in units; `gpus` of these are GPUs. `head`
    is what the first pod requests, if that is less of some resources and more of none; None if all
    pods are alike.
    """

    nodes: int
    pod: dict[str, int]
    gpus: int = 0
    head: dict[str, int] | None = None
    head_gpus: int = 0

    @property
    def first(self) -> tuple[dict[str, int], int]:
        """Requests and GPUs of the first pod."""
        return (self.pod, self.gpus) if self.head is None else (self.head, self.head_gpus)


def requests_of(job: TorchrunJob, queue: TorchrunQueue, size: Size) -> GangRequests:
    """Return the requests of a gang of this size, with the pod templates of queue and job."""
    layers = _layers(job, queue)
    gpu = queue.spec.node_resources.gpu_resource_name
    head = None
    if size.head is not None and job.spec.head is not None:
        head = _of_pod(size.head, (*layers, job.spec.head.pod_template))
    return _build_requests(size.nodes, _of_pod(size, layers), head, gpu)


def requests_of_pods(
    nodes: int, pod: PodRequests, head: PodRequests | None, gpu: str
) -> GangRequests:
    """Return what pods with these specs request; `gpu` is the name of the resource of GPUs."""
    first = None if head is None else amounts_of_pod(head)
    return _build_requests(nodes, amounts_of_pod(pod), first, gpu)


def amounts_of_pod(spec: PodRequests) -> dict[str, int]:
    """Return what a pod requests, as in GangRequests."""
    amounts = amounts_of_spec(spec)
    return {"pods": 1} | {name: _whole(name, amount) for name, amount in amounts.items()}


def _build_requests(
    nodes: int, pod: dict[str, int], head: dict[str, int] | None, gpu: str
) -> GangRequests:
    gang = GangRequests(nodes=nodes, pod=pod, gpus=pod.get(gpu, 0))
    if head is None:
        return gang
    if all(amount <= pod.get(name, 0) for name, amount in head.items()):
        return structs.replace(gang, head=head, head_gpus=head.get(gpu, 0))
    # Each pod counts as the larger of the two.
    most = {name: max(pod.get(name, 0), head.get(name, 0)) for name in {**pod, **head}}
    return structs.replace(gang, pod=most, gpus=most.get(gpu, 0))


def check_templates(job: TorchrunJob, queue: TorchrunQueue) -> None:
    """Check the resources in the pod templates of queue and job.

    Raises:
        InvalidSpecError: they cannot be read.
    """
    heads = () if job.spec.head is None else (job.spec.head.pod_template,)
    for layers in _layers(job, queue), (*_layers(job, queue), *heads):
        check_requests({"spec": _merge_specs(layers)})


def _layers(job: TorchrunJob, queue: TorchrunQueue) -> tuple[PodTemplate, ...]:
    return (queue.spec.pod_template, job.spec.pod_template)


def _merge_specs(layers: tuple[PodTemplate, ...]) -> JsonObject:
    spec: JsonObject = {}
    for layer in layers:
        spec = merge(spec, layer.spec)
    return spec


def _of_pod(size: Size, layers: tuple[PodTemplate, ...]) -> dict[str, int]:
    """Return the requests of a pod: the trainer, the launcher and all other containers."""
    trainer: JsonObject = {
        "name": names.TRAINER_CONTAINER,
        "resources": {"requests": dict(size.requests), "limits": dict(size.limits)},
    }
    launcher: JsonObject = {"name": names.LAUNCHER_CONTAINER}
    containers: JsonObject = {"containers": [trainer], "initContainers": [launcher]}
    spec = merge(_merge_specs(layers), containers)
    set_launcher_resources(spec)
    amounts = amounts_of_template({"spec": spec})
    return {"pods": 1} | {name: _whole(name, amount) for name, amount in amounts.items()}


def admitted_requests(admission: Admission) -> GangRequests | None:
    """Return what was admitted; None if the admission does not record it, or cannot be read."""
    head = admission.head
    gpus = (admission.gpus, 0 if head is None else head.gpus)
    if not admission.queue or min(gpus) < 0:
        return None
    try:
        return GangRequests(
            nodes=max(0, admission.nodes),
            pod=_amounts(admission.requests),
            gpus=gpus[0],
            head=None if head is None else _amounts(head.requests),
            head_gpus=gpus[1],
        )
    except QuantityError:
        return None


def admission_of(requests: GangRequests, queue: str) -> Admission:
    """Return the record of an admission for these requests in this queue."""
    head = requests.head
    return Admission(
        nodes=requests.nodes,
        queue=queue,
        requests=_quantities(requests.pod),
        gpus=requests.gpus,
        head=None
        if head is None
        else AdmittedHead(requests=_quantities(head), gpus=requests.head_gpus),
    )


def shortfall(requests: GangRequests, grant: GangRequests) -> str:
    """Return the first request beyond what was admitted; "" if all of it fits.

    Pods are compared one by one, not by their sums: the admission reserved machines for these pods.
    """
    if requests.nodes > grant.nodes:
        return f"The job requests {count_of(requests.nodes, 'node')}."
    return pod_shortfall(requests, grant)


def pod_shortfall(requests: GangRequests, grant: GangRequests) -> str:
    """Return the same for each pod, without the number of nodes."""
    each = _exceeds((requests.pod, requests.gpus), (grant.pod, grant.gpus), "each node")
    return each or _exceeds(requests.first, grant.first, "the first node")


def _exceeds(
    requests: tuple[dict[str, int], int], granted_amounts: tuple[dict[str, int], int], where: str
) -> str:
    (amounts, gpus), (limits, gpu_limit) = requests, granted_amounts
    if gpus > gpu_limit:
        return (
            f"The job requests {count_of(gpus, 'GPU')} on {where}, but was admitted"
            f" with {gpu_limit}."
        )
    for name, amount in sorted(amounts.items()):
        limit = limits.get(name, 0)
        if amount > limit:
            request = f"{_quantity(name, amount)} of {name} on {where}"
            return f"The job requests {request}, but was admitted with {_quantity(name, limit)}."
    return ""


def _amounts(quantities: dict[str, int | str]) -> dict[str, int]:
    return {"pods": 1} | {name: _whole(name, parse(value)) for name, value in quantities.items()}


def _whole(name: str, amount: Fraction) -> int:
    """Return the amount rounded up to millicores, bytes or units."""
    return ceil(amount * (1000 if name == "cpu" else 1))


def _quantities(pod: dict[str, int]) -> dict[str, int | str]:
    return {name: _quantity(name, amount) for name, amount in pod.items() if name != "pods"}


def _quantity(name: str, amount: int) -> int | str:
    if name == "cpu":
        return format_cpu(Fraction(amount, 1000))
    return format_bytes(Fraction(amount)) if name == "memory" else amount


def total_requests(parts: tuple[tuple[JsonObject, int], ...]) -> JsonObject:
    """Return the requests of all pods as a v1 ResourceList. `parts` are templates and counts."""
    sums: Amounts = {}
    for requests, pods in [(amounts_of_template(part), pods) for part, pods in parts]:
        sums = _sum(sums, {name: amount * pods for name, amount in requests.items()})
    return {name: _format_quantity(name, sums[name]) for name in sorted(sums)}


def amounts_of_template(template: JsonObject) -> Amounts:
    """Return the requests of one pod of a v1 PodTemplateSpec.

    Does not raise: what the API server refuses in a pod counts as nothing.
    """
    try:
        return amounts_of_spec(msgspec.convert(template.get("spec"), PodRequests))
    except msgspec.ValidationError:
        return {}


def check_requests(template: JsonObject) -> None:
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


def amounts_of_spec(spec: PodRequests) -> Amounts:
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
