"""The job and the queue of a run on this machine, from flags or from a file."""

import os
import random
import socket
import uuid
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import msgspec
from msgspec.structs import replace

from kubectl_torchrun.errors import UsageProblem
from kubectl_torchrun.local.environment import HOST
from kubectl_torchrun.upload import job_manifest, user_manifest
from kubectl_torchrun.upload.job_manifest import Request
from kubectl_torchrun.upload.unknown_fields import check_fields
from torchrun_api.json import JsonObject
from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.meta import ObjectMeta
from torchrun_api.kinds.queue import NodeResources, TorchrunQueue, TorchrunQueueSpec
from torchrun_api.kinds.shared import Distributed
from torchrun_controller.reconcile.spec.errors import InvalidSpecError
from torchrun_controller.reconcile.spec.validation import validate

QUEUE = "local"
# What a run on this machine uses of a spec.
_USED = frozenset(
    {
        *("command", "launcher", "workingDir", "env", "setupCommand", "requirements"),
        *("numNodes", "numGPUs", "nodeResources", "elastic", "distributed", "reliability"),
    }
)
# They need no word: the queue and the image are this machine.
_QUIET = frozenset({"jobQueue", "image", "development", "volumes"})
_ROUND_PORTS = 17  # torchrun_controller.reconcile.objects.network: 16 for rounds, one of the gang
_PORTS = range(20_000, 32_000)  # below the ports that Linux gives to clients
_TRIES = 200
_MOST_RANKS = 64  # of small machines


def job_and_queue(
    request: Request, gpus_per_node: int | None, now: datetime
) -> tuple[TorchrunJob, TorchrunQueue, list[str]]:
    """Return the job, a queue that fits it, and the fields of its file that have no meaning here.

    Raises UsageProblem for a spec that cannot run on this machine.
    """
    body = _body(request)
    spec = body["spec"]
    assert isinstance(spec, dict)
    if spec.get("head") is not None:
        raise UsageProblem(
            "spec.head needs a cluster: on this machine all nodes are alike. Remove head, or submit"
            " the job without --local."
        )
    ignored = [f"spec.{name}" for name in spec if name not in _USED | _QUIET]
    ignored += _ignored_volumes(spec)
    kept: JsonObject = {name: value for name, value in spec.items() if name in _USED}
    resources = kept.pop("nodeResources", None)
    own_gpus = resources.get("gpus") if isinstance(resources, dict) else None
    if gpus_per_node is None and isinstance(own_gpus, int):
        gpus_per_node = own_gpus
    all_gpus = spec.get("numGPUs")
    if gpus_per_node is None and isinstance(all_gpus, int):
        gpus_per_node = all_gpus  # on one node
    try:
        job = msgspec.convert({"metadata": body["metadata"], "spec": kept}, TorchrunJob)
    except msgspec.ValidationError as error:
        raise UsageProblem(f"The job is not valid: {error}") from error
    meta = replace(
        job.metadata, namespace="local", uid=str(uuid.uuid4()), generation=1, creation_timestamp=now
    )
    _check_size(job, gpus_per_node or 1)
    distributed = replace(job.spec.distributed, port=_free_ports())
    if not has_gpus():
        distributed = replace(distributed, backend=distributed.backend or "gloo")
    job = replace(
        job,
        metadata=meta,
        spec=replace(job.spec, job_queue=QUEUE, image=QUEUE, distributed=distributed),
    )
    queue = _queue(gpus_per_node)
    try:
        validate(job, queue)
    except InvalidSpecError as error:  # nobody could correct the job while it runs
        raise UsageProblem(str(error)) from error
    return job, queue, ignored


def devices_of(index: int, gpus_per_node: int) -> Sequence[int]:
    """Return the GPUs of a node of this machine; none without GPUs."""
    if not gpus_per_node or not has_gpus():
        return ()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    numbers = [int(n) for n in visible.split(",") if n.isdecimal()] if visible else []
    first = index * gpus_per_node
    return numbers[first : first + gpus_per_node] or range(first, first + gpus_per_node)


def has_gpus() -> bool:
    """Return whether this machine has a GPU of NVIDIA or AMD."""
    return any(Path(path).exists() for path in ("/dev/nvidia0", "/dev/kfd"))


def _check_size(job: TorchrunJob, gpus_per_node: int) -> None:
    """Raise UsageProblem for more ranks than a machine can start."""
    per_node = job.spec.distributed.nproc_per_node
    nodes, each = job.spec.num_nodes or 1, per_node if isinstance(per_node, int) else gpus_per_node
    ranks = max(nodes * each, job.spec.num_gpus or 0)
    most = max(_MOST_RANKS, 4 * (os.cpu_count() or 1))
    if ranks > most:
        raise UsageProblem(
            f"The job has {ranks} ranks, but this machine runs at most {most}. Use fewer --nodes or"
            " --gpus-per-node, or a cluster without --local."
        )


def _body(request: Request) -> JsonObject:
    if request.manifest is not None:
        check_fields("--filename", request.manifest, TorchrunJob)
        return user_manifest.fill(request.manifest, request.name, QUEUE, "local")
    return job_manifest.from_flags(request._replace(queue=QUEUE), "local")


def _ignored_volumes(spec: JsonObject) -> list[str]:
    volumes = spec.get("volumes")
    if not isinstance(volumes, dict):
        return []
    return [f"spec.volumes.{name}" for name in volumes if name != "workspace"]


def _queue(gpus_per_node: int | None) -> TorchrunQueue:
    resources = NodeResources(gpus=gpus_per_node or 0)
    meta = ObjectMeta(name=QUEUE, namespace="local", uid=QUEUE)
    spec = TorchrunQueueSpec(image=QUEUE, node_resources=resources, distributed=Distributed())
    return TorchrunQueue(metadata=meta, spec=spec)


def _free_ports() -> int:
    """Return the first of _ROUND_PORTS free ports. Raises UsageProblem if none are found."""
    for _ in range(_TRIES):
        first = random.randrange(_PORTS.start, _PORTS.stop - _ROUND_PORTS)  # noqa: S311
        if all(_is_free(port) for port in range(first, first + _ROUND_PORTS)):
            return first
    raise UsageProblem(f"No {_ROUND_PORTS} free ports in a row were found on {HOST}.")


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET) as probe, suppress(OSError):
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((HOST, port))
        return True
    return False
