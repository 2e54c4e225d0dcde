"""How large a gang is, and what each of its pods requests."""

import math
from fractions import Fraction

from msgspec import Struct, structs

from torchrun_api.kinds.job import JobNodeResources, TorchrunJobSpec
from torchrun_api.kinds.quantity import amount_of, format_bytes, format_cpu
from torchrun_api.kinds.queue import NodeResources, TorchrunQueueSpec
from torchrun_api.kinds.shared import PodTemplate
from torchrun_controller.reconcile.spec.pod_template import trainer_resource


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


def size_of(spec: TorchrunJobSpec, queue: TorchrunQueueSpec) -> Size:
    """Return the nodes of the gang, and what each requests.

    The head of a job has its own nodeResources. Does not raise: `validation` refuses what does not
    fit the queue.
    """
    queue_resources = node_resources(queue, spec.pod_template)
    gpus = gpus_of(spec.node_resources, queue_resources)
    if spec.num_gpus is not None:
        nodes, gpus = spread(spec.num_gpus, gpus)
    else:
        nodes = spec.num_nodes or 1
    head = None
    if spec.head is not None:
        resources = spec.head.node_resources
        most = node_resources(queue, spec.pod_template, spec.head.pod_template)
        head = _of_pods(nodes, gpus_of(resources, most), resources, most)
    size = _of_pods(nodes, gpus, spec.node_resources, queue_resources)
    return structs.replace(size, head=head)


def node_resources(queue: TorchrunQueueSpec, *templates: PodTemplate) -> NodeResources:
    """Return what a node of the queue has for a job with these pod templates.

    Without GPUs in its nodeResources, a node has those of the training container in the templates.
    """
    resources = queue.node_resources
    if resources.gpus:
        return resources
    layers = (queue.pod_template, *templates)
    amount = trainer_resource(layers, resources.gpu_resource_name)
    return structs.replace(resources, gpus=0 if amount is None else int(amount_of(amount)))


def gpus_of(job_resources: JobNodeResources, queue_resources: NodeResources) -> int:
    """Return the GPUs that a pod of the job may have."""
    return queue_resources.gpus if job_resources.gpus is None else job_resources.gpus


def _of_pods(
    nodes: int,
    gpus_per_node: int,
    job_resources: JobNodeResources,
    queue_resources: NodeResources,
) -> Size:
    """Return the size of a gang whose pods have this many GPUs each."""
    # A job without GPUs gets no proportional share, but the CPU and memory of its spec, or all.
    share = Fraction(gpus_per_node or queue_resources.gpus or 1, queue_resources.gpus or 1)
    cpus = _amount(job_resources.cpus, queue_resources.cpus, share)
    memory = _amount(job_resources.memory, queue_resources.memory, share)
    requests: dict[str, str] = {}
    if cpus is not None:
        requests["cpu"] = format_cpu(cpus)
    if memory is not None:
        requests["memory"] = format_bytes(memory)
    limits = {name: value for name, value in requests.items() if name != "cpu"}
    devices = {name: str(value) for name, value in sorted(queue_resources.extra.items())}
    gpu = queue_resources.gpu_resource_name
    if gpus_per_node:
        devices[gpu] = str(gpus_per_node)
    return Size(
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        requests=requests | devices,
        limits=limits | devices,
    )


def _amount(
    job_value: int | str | None, queue_value: int | str | None, share: Fraction
) -> Fraction | None:
    """Return what the job sets, else its share of the node of the queue."""
    if job_value is not None:
        return amount_of(job_value)
    return None if queue_value is None else amount_of(queue_value) * share


def spread(gpus: int, per_node: int) -> tuple[int, int]:
    """Return the smallest number of nodes for these GPUs, and the GPUs of each node.

    All nodes have equally many, so there may be a few more than `gpus` (see `validation`).
    """
    nodes = math.ceil(gpus / max(1, per_node))
    return nodes, math.ceil(gpus / nodes)
