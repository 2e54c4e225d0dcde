"""The list of fields that are accepted but not supported yet.

The change that supports a field removes it from this list. So no field is silently ignored.
"""

from torchrun_api.kinds.job import TorchrunJobSpec
from torchrun_api.kinds.queue import TorchrunQueueSpec
from torchrun_api.kinds.shared import RdzvBackend


def not_yet_supported(job: TorchrunJobSpec, queue: TorchrunQueueSpec) -> tuple[str, ...]:
    """What the job and its queue request without effect, one sentence each.

    For the message of the condition NotYetSupported.
    """
    conflicts = []
    etcd = etcd_without_endpoint(job, queue)
    if etcd is not None:
        conflicts.append(
            f"distributed.rdzvBackend is {etcd}, but distributed.rdzvEndpoint is not set."
            f" {usual_rendezvous(job)} is used instead. Set distributed.rdzvEndpoint to your etcd"
            " or remove rdzvBackend."
        )
    if queue.parent_kai_queue is not None and queue.kai_queue is None:
        conflicts.append(
            "spec.parentKaiQueue of the queue has no effect without spec.kaiQueue. Set"
            " spec.kaiQueue or remove spec.parentKaiQueue."
        )
    return tuple(conflicts)


def etcd_without_endpoint(job: TorchrunJobSpec, queue: TorchrunQueueSpec) -> RdzvBackend | None:
    """The requested etcd backend if no endpoint is set; None otherwise."""
    backend = job.distributed.rdzv_backend or queue.distributed.rdzv_backend
    endpoint = job.distributed.rdzv_endpoint or queue.distributed.rdzv_endpoint
    return backend if backend in ("etcd", "etcd-v2") and endpoint is None else None


def usual_rendezvous(job: TorchrunJobSpec) -> RdzvBackend:
    """The default backend."""
    return "static" if job.elastic is None else "c10d"
