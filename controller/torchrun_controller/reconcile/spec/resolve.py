"""The resolved spec of a run: the queue's template with the job's overrides and all defaults.

`resolve` does not refuse anything: a gang that runs, a reload and a resize need the spec, whatever
rules the present version of the controller has for new jobs. Those are in `validation`.
"""

from typing import Literal, NamedTuple, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from torchrun_api import names
from torchrun_api.json import JsonObject
from torchrun_api.kinds.job import TorchrunJob, TorchrunJobSpec
from torchrun_api.kinds.quantity import amount_of, format_bytes
from torchrun_api.kinds.queue import (
    CheckpointStorage,
    TorchrunQueue,
    TorchrunQueueSpec,
    WorkspaceStorage,
)
from torchrun_api.kinds.shared import CheckpointsOverride, Dataset, DeliveryMode, RdzvBackend
from torchrun_api.kinds.unsupported import etcd_without_endpoint, usual_rendezvous
from torchrun_controller.reconcile.spec.pod_template import trainer_image
from torchrun_controller.reconcile.spec.reliability import resolve_reliability
from torchrun_controller.reconcile.spec.size import Size, size_of

DEFAULT_CLAIM_SIZE = "10Gi"
DEFAULT_PORT = 29500

T = TypeVar("T")


class Scheduling(NamedTuple):
    """Fields of a v1 PodSpec."""

    node_selector: dict[str, str]
    tolerations: tuple[JsonObject, ...]
    affinity: JsonObject | None


def scheduling_of(job: TorchrunJob, queue: TorchrunQueue | None) -> Scheduling:
    """Return the merged settings; those of the job alone if the queue does not exist."""
    override = job.spec.scheduling
    if queue is None:
        return Scheduling(override.node_selector, override.tolerations, override.affinity)
    base = queue.spec.scheduling
    return Scheduling(
        base.node_selector | override.node_selector,
        base.tolerations + override.tolerations,
        base.affinity if override.affinity is None else override.affinity,
    )


class WorkspaceDownload(Struct, frozen=True, kw_only=True):
    """Where workers fetch a workspace that is not mounted, and the SHA-256 of its manifest."""

    url: str
    manifest: str


class VolumeSource(Struct, frozen=True, kw_only=True):
    """A claim to make (`existing` False) or to mount (True), or a directory of each machine."""

    name: str
    mount_path: str
    existing: bool = False
    size: str = DEFAULT_CLAIM_SIZE
    storage_class_name: str | None = None
    access_mode: str = "ReadWriteOnce"
    retain: bool = False
    sub_path: str = ""
    host_path: str = ""
    delivery: DeliveryMode = "auto"
    served: WorkspaceDownload | None = None


class Setup(Struct, frozen=True, kw_only=True):
    """What is installed before the command runs."""

    requirements: tuple[str, ...]
    command: str | tuple[str, ...]


class Rendezvous(Struct, frozen=True, kw_only=True):
    """torchrun's rendezvous; `endpoint` None means the first worker."""

    backend: RdzvBackend
    endpoint: str | None
    port: int
    fallback_from: str = ""


class ResolvedSpec(Struct, frozen=True, kw_only=True):
    """What the builders of objects need to know, and nothing that they would have to decide.

    `restart_limits` are those of one gang, see `gang.in_place`; None without restarts in place.
    """

    size: Size
    image: str
    setup: Setup | None
    workspace: VolumeSource | None
    checkpoints: VolumeSource | None
    datasets: tuple[Dataset, ...]
    shm_size: str | None
    nproc_per_node: int
    max_restarts: int
    backend: str
    rendezvous: Rendezvous
    working_dir: str | None
    priority_class_name: str | None
    node_selector: dict[str, str]
    tolerations: tuple[JsonObject, ...]
    affinity: JsonObject | None
    grace_seconds: int
    hang_seconds: int | None
    restart_limits: JsonObject | None = None


def resolve(job: TorchrunJob, queue: TorchrunQueue) -> ResolvedSpec:
    """Merge `job` over `queue`. Does not raise."""
    spec, template = job.spec, queue.spec
    size = size_of(spec, template)
    workspace = _workspace(job, template, size)
    policy = resolve_reliability(job, queue)
    scheduling = scheduling_of(job, queue)
    return ResolvedSpec(
        size=size,
        image=image_of(spec, template),
        setup=_setup(spec),
        workspace=workspace,
        checkpoints=_checkpoints(job, template, size),
        datasets=_by_name(template.storage.datasets, spec.volumes.datasets),
        shm_size=_shm_size(template, size),
        nproc_per_node=_nproc_per_node(spec, template, size),
        max_restarts=_first(spec.distributed.max_restarts, template.distributed.max_restarts, 0),
        backend=_first(
            spec.distributed.backend,
            template.distributed.backend,
            "nccl" if size.gpus_per_node else "gloo",
        ),
        rendezvous=_rendezvous(spec, template),
        working_dir=spec.working_dir
        or template.working_dir
        or (workspace.mount_path if workspace else None),
        priority_class_name=spec.scheduling.priority_class_name
        or template.scheduling.priority_class_name,
        node_selector=scheduling.node_selector,
        tolerations=scheduling.tolerations,
        affinity=scheduling.affinity,
        grace_seconds=policy.grace_seconds,
        hang_seconds=policy.hang_seconds,
    )


def of_head(run: ResolvedSpec, job: TorchrunJob, queue: TorchrunQueue) -> ResolvedSpec:
    """The run as the head's own pod sees it."""
    assert run.size.head is not None
    assert job.spec.head is not None
    size = run.size.head
    nproc_per_node = _nproc_per_node(job.spec, queue.spec, size)
    return replace(
        run,
        size=size,
        image=trainer_image(job.spec.head.pod_template) or run.image,
        shm_size=_shm_size(queue.spec, size),
        nproc_per_node=nproc_per_node,
    )


def _nproc_per_node(spec: TorchrunJobSpec, template: TorchrunQueueSpec, size: Size) -> int:
    return _first(
        spec.distributed.nproc_per_node,
        template.distributed.nproc_per_node,
        max(1, size.gpus_per_node),
    )


def _first(job_value: T | None, queue_value: T | None, default: T) -> T:
    if job_value is not None:
        return job_value
    return default if queue_value is None else queue_value


def _claim_size(size: int | str | None, size_per_gpu: int | str | None, gpus: int) -> str:
    if size is not None:
        return format_bytes(amount_of(size))
    if size_per_gpu is not None:
        return format_bytes(amount_of(size_per_gpu) * max(1, gpus))
    return DEFAULT_CLAIM_SIZE


def _default_access(spec: TorchrunJobSpec, size: Size) -> Literal["ReadWriteMany", "ReadWriteOnce"]:
    """Return the access mode for every size of the job, because a PVC keeps its access mode."""
    most_nodes = size.nodes if spec.elastic is None else spec.elastic.max_nodes
    return "ReadWriteMany" if most_nodes > 1 else "ReadWriteOnce"


def _workspace(job: TorchrunJob, template: TorchrunQueueSpec, size: Size) -> VolumeSource | None:
    """Return the workspace; None if the code is in the image."""
    volume = job.spec.volumes.workspace
    if volume is None or not volume.enabled or volume.source == "none":
        return None
    storage = template.storage.workspace or WorkspaceStorage()
    mount_path = volume.mount_path or storage.mount_path
    if volume.claim_name is not None and volume.source == "existing":
        return VolumeSource(
            name=volume.claim_name,
            existing=True,
            mount_path=mount_path,
            sub_path=volume.sub_path or "",
        )
    delivery = volume.delivery or storage.delivery
    # Only the pod that serves the workspace mounts the claim, so it may be ReadWriteOnce.
    default_access = "ReadWriteOnce" if delivery == "direct" else _default_access(job.spec, size)
    return VolumeSource(
        name=names.workspace_claim(job.metadata.name),
        delivery=delivery,
        mount_path=mount_path,
        size=_claim_size(
            storage.size if volume.size is None else volume.size, storage.size_per_gpu, size.gpus
        ),
        storage_class_name=volume.storage_class_name or storage.storage_class_name,
        access_mode=volume.access_mode or storage.access_mode or default_access,
        retain=storage.retain,
    )


def _checkpoints(job: TorchrunJob, template: TorchrunQueueSpec, size: Size) -> VolumeSource | None:
    """Return the volume for checkpoints; None if neither queue nor job has one."""
    storage, override = template.storage.checkpoints, job.spec.volumes.checkpoints
    if override is not None:
        storage = _merge_checkpoints(storage or CheckpointStorage(), override)
    if storage is None or not storage.enabled:
        return None
    host_path = storage.host_path or ""
    if host_path:
        host_path = f"{host_path.rstrip('/')}/{job.metadata.namespace}/{job.metadata.name}"
    return VolumeSource(
        name=storage.claim_name or names.checkpoints_claim(job.metadata.name),
        existing=bool(storage.claim_name or host_path),
        host_path=host_path,
        mount_path=storage.mount_path,
        size=_claim_size(storage.size, storage.size_per_gpu, size.gpus),
        storage_class_name=storage.storage_class_name,
        access_mode=storage.access_mode or _default_access(job.spec, size),
        retain=storage.retain,
    )


def _merge_checkpoints(
    storage: CheckpointStorage, override: CheckpointsOverride
) -> CheckpointStorage:
    """Return the storage of the queue with the values of the job.

    size and sizePerGPU are one setting. A claim of the job overrides hostPath of the queue, and a
    hostPath of the job overrides a claim of the queue.
    """
    has_size = override.size is not None or override.size_per_gpu is not None
    queue_path = None if override.claim_name else storage.host_path
    return CheckpointStorage(
        enabled=storage.enabled if override.enabled is None else override.enabled,
        size=override.size if has_size else storage.size,
        size_per_gpu=override.size_per_gpu if has_size else storage.size_per_gpu,
        storage_class_name=override.storage_class_name or storage.storage_class_name,
        access_mode=override.access_mode or storage.access_mode,
        claim_name=override.claim_name or storage.claim_name,
        host_path=override.host_path or queue_path,
        mount_path=override.mount_path or storage.mount_path,
        retain=storage.retain if override.retain is None else override.retain,
    )


def _shm_size(template: TorchrunQueueSpec, size: Size) -> str | None:
    per_gpu = template.storage.shm_size_per_gpu
    if per_gpu is None:
        return None
    return format_bytes(amount_of(per_gpu) * max(1, size.gpus_per_node))


def _rendezvous(spec: TorchrunJobSpec, template: TorchrunQueueSpec) -> Rendezvous:
    default_backend = usual_rendezvous(spec)
    backend = _first(
        spec.distributed.rdzv_backend, template.distributed.rdzv_backend, default_backend
    )
    endpoint = spec.distributed.rdzv_endpoint or template.distributed.rdzv_endpoint
    port = _first(spec.distributed.port, template.distributed.port, DEFAULT_PORT)
    fallback_from = etcd_without_endpoint(spec, template)
    if fallback_from is not None:
        return Rendezvous(
            backend=default_backend, endpoint=None, port=port, fallback_from=fallback_from
        )
    return Rendezvous(backend=backend, endpoint=endpoint, port=port)


def _by_name(queue: tuple[Dataset, ...], job: tuple[Dataset, ...]) -> tuple[Dataset, ...]:
    by_name = {dataset.name: dataset for dataset in queue + job}
    return tuple(by_name.values())


def _setup(spec: TorchrunJobSpec) -> Setup | None:
    if not spec.setup_command and not spec.requirements:
        return None
    return Setup(requirements=spec.requirements, command=spec.setup_command)


def image_of(spec: TorchrunJobSpec, template: TorchrunQueueSpec) -> str:
    """Return the image of the job, by either field, or that of its queue; "" if none is set."""
    return (
        spec.image
        or trainer_image(spec.pod_template)
        or template.image
        or trainer_image(template.pod_template)
    )
