"""How large a gang is, and what each of its pods requests."""

import math
from fractions import Fraction

from msgspec import Struct, structs

from torchrun_api.job import JobNodeResources, TorchrunJobSpec
from torchrun_api.quantity import format_bytes, format_cpu, parse
from torchrun_api.queue import NodeResources
from torchrun_controller.reconcile.spec.errors import InvalidSpecError


class Size(Struct, frozen=True, kw_only=True):
    """How large the gang is, and what each of its pods requests (quantities as text)."""

    nodes: int
    gpus_per_node: int
    requests: dict[str, str]
    limits: dict[str, str]
    head: "Size | None" = None  # the same nodes, with the requests of the first pod

    @property
    def gpus(self) -> int:
        """GPUs of the whole gang."""
        if self.head is not None:
            return self.head.gpus_per_node + (self.nodes - 1) * self.gpus_per_node
        return self.nodes * self.gpus_per_node


def size_of(spec: TorchrunJobSpec, queue_resources: NodeResources) -> Size:
    """Return the nodes of the gang, and what each requests; `queue_resources` are of a node.

    The head of a job has nodeResources of its own.

    Raises:
        InvalidSpecError: the spec does not determine the number of nodes.
        QuantityError: a quantity of job or queue cannot be read.
    """
    gpus = _gpus(spec.node_resources, queue_resources, "spec")
    if (spec.num_nodes is None) == (spec.num_gpus is None):
        raise InvalidSpecError("Set exactly one of spec.numNodes and spec.numGPUs.")
    if spec.num_nodes is not None:
        nodes, gpus_per_node = spec.num_nodes, gpus
    else:
        assert spec.num_gpus is not None
        nodes, gpus_per_node = _spread(spec.num_gpus, gpus)
    head = None
    if spec.head is not None:
        head_gpus = _gpus(spec.head.node_resources, queue_resources, "spec.head")
        head = _of_pods(nodes, head_gpus, spec.head.node_resources, queue_resources, "spec.head")
    size = _of_pods(nodes, gpus_per_node, spec.node_resources, queue_resources, "spec")
    return structs.replace(size, head=head)


def _gpus(job_resources: JobNodeResources, queue_resources: NodeResources, path: str) -> int:
    """Return the GPUs that a pod of the job may have."""
    gpus = queue_resources.gpus if job_resources.gpus is None else job_resources.gpus
    if gpus > queue_resources.gpus:
        raise InvalidSpecError(_too_much(f"{path}.nodeResources.gpus", gpus, queue_resources.gpus))
    return gpus


def _of_pods(
    nodes: int,
    gpus_per_node: int,
    job_resources: JobNodeResources,
    queue_resources: NodeResources,
    path: str,
) -> Size:
    """Return the size of a gang whose pods have this many GPUs each.

    Raises InvalidSpecError if the job requests more than a node of the queue has.
    """
    # A job without GPUs gets no proportional share, but the CPU and memory of its spec, or all.
    share = Fraction(gpus_per_node or queue_resources.gpus or 1, queue_resources.gpus or 1)
    cpus = _amount(f"{path}.nodeResources.cpus", job_resources.cpus, queue_resources.cpus, share)
    memory = _amount(
        f"{path}.nodeResources.memory", job_resources.memory, queue_resources.memory, share
    )
    requests: dict[str, str] = {}
    if cpus is not None:
        requests["cpu"] = format_cpu(cpus)
    if memory is not None:
        requests["memory"] = format_bytes(memory)
    limits = {name: value for name, value in requests.items() if name != "cpu"}
    devices = {name: str(value) for name, value in sorted(queue_resources.extra.items())}
    if gpus_per_node:
        devices[queue_resources.gpu_resource_name] = str(gpus_per_node)
    return Size(
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        requests=requests | devices,
        limits=limits | devices,
    )


def _amount(
    field: str, job_value: int | str | None, queue_value: int | str | None, share: Fraction
) -> Fraction | None:
    """Return what the job sets, else its share of the node of the queue."""
    most = None if queue_value is None else parse(queue_value)
    if job_value is None:
        return None if most is None else most * share
    amount = parse(job_value)
    if most is not None and amount > most:
        raise InvalidSpecError(_too_much(field, job_value, queue_value))
    return amount


def _too_much(field: str, job_value: object, queue_value: object) -> str:
    return (
        f"{field} is {job_value}, but nodeResources.{field.rpartition('.')[2]} of the queue is"
        f" {queue_value}. Request at most {queue_value} or choose another queue."
    )


def _spread(gpus: int, per_node: int) -> tuple[int, int]:
    """Return the smallest number of nodes with equally many GPUs each, and the GPUs of each."""
    if per_node == 0:
        raise InvalidSpecError(
            f"spec.numGPUs is {gpus}, but nodeResources.gpus of the queue is 0. Set numNodes"
            " instead or choose another queue."
        )
    nodes = math.ceil(gpus / per_node)
    if gpus % nodes:
        below = next(n for n in range(gpus - 1, 0, -1) if n % math.ceil(n / per_node) == 0)
        above = next(n for n in range(gpus + 1, 2 * gpus) if n % math.ceil(n / per_node) == 0)
        raise InvalidSpecError(
            f"spec.numGPUs {gpus} does not divide evenly among {nodes} nodes with up to {per_node}"
            f" GPUs each. Use {below} or {above}."
        )
    return nodes, gpus // nodes
